"""`python -m paged_kv.check --module mine.block_manager`: hold somebody's own code to the rules.

Written by hand: the checks themselves are exported by appendix A5.
"""

from paged_kv.check_suites import check_main

if __name__ == "__main__":
    raise SystemExit(check_main())
