"""`python -m paged_kv`: the command `paged-kv`, wherever the package can be imported."""

from paged_kv.command import start

if __name__ == "__main__":
    start()
