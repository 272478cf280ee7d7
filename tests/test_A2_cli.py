"""Appendix A2: the command line, as a user would type it."""

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from paged_kv import cli
from paged_kv.capacity_report import mean_bytes, read_lengths, users_report
from paged_kv.command import EXTRAS
from paged_kv.config_facts import KNOWN
from paged_kv.configs import from_config
from paged_kv.sizing import GB, GiB
from paged_kv.weights import weight_bytes

DATA = Path(__file__).parents[1] / "book" / "data" / "configs"
CONFIGS = sorted(DATA.glob("*.json"))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["size", *arguments])


def report(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from paged_kv.cli import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------------------ answers


def test_llama_3_8b_prints_its_bytes_per_token() -> None:
    for name in ("llama-3-8b", str(DATA / "llama-3-8b.json")):
        done = run(name)
        assert done.exit_code == 0
        assert "131,072 B = 128 KiB" in done.stdout
        assert report(name)["bytes_per_token"] == 131_072


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_test_config_is_sized(path: Path) -> None:
    found = report(str(path), "--context", "2048", "--memory", "2000GB", "--weights", "500GB")
    kv = from_config(path)
    assert found["bytes_per_token"] == kv.bytes_per_token
    assert found["blocks"] == (2000 * GB - 500 * GB) // (16 * kv.bytes_per_token)


def test_54_gib_hold_27648_blocks() -> None:
    found = report("llama-3-8b", "--memory", "54GiB", "--weights", "0B")
    assert (found["blocks"], found["tokens"]) == (27_648, 442_368)


def test_the_reservation_of_chapter_01() -> None:
    found = report("llama-3-70b", "--memory", "50GiB", "--weights", "0B", "--context", "4096", "--mean-tokens", "300")
    assert (found["sequences_reserved"], found["sequences_paged"]) == (40, 538)
    assert round(100 * found["waste_reserved"], 2) == 92.68
    text = run(
        "llama-3-70b", "--memory", "50GiB", "--weights", "0B", "--context", "4096", "--mean-tokens", "300"
    ).stdout
    assert "92.68 % reserved" in text
    assert re.search(r"sequences of 300\s+538 in blocks", text)


def test_units_are_parsed_and_printed_right() -> None:
    text = run("llama-3-8b", "--memory", "80GB").stdout
    assert "74.51 GiB (80 GB)" in text
    assert report("llama-3-8b", "--memory", "80GB")["memory_bytes"] == 80 * 10**9
    assert report("llama-3-8b", "--memory", "80 GiB")["memory_bytes"] == 80 * GiB


def test_weights_auto_size_and_overhead() -> None:
    auto = report("llama-3-8b", "--memory", "80GB")
    assert auto["weight_bytes"] == weight_bytes(KNOWN["llama-3-8b"])
    stated = report("llama-3-8b", "--memory", "80GB", "--weights", "16GB", "--overhead", "4GB")
    assert stated["kv_memory_bytes"] == 60 * GB


def test_tensor_parallel_splits_weights_and_heads() -> None:
    one, two = (report("llama-3-8b", "--memory", "80GB", "--weights", "16GB", "--tp", n) for n in ("1", "2"))
    assert two["weight_bytes"] == one["weight_bytes"] // 2
    assert two["bytes_per_token"] == one["bytes_per_token"] // 2
    assert two["sequences_at_context"] > 2 * one["sequences_at_context"]


def test_kv_dtype_and_block_size() -> None:
    found = report("llama-3-8b", "--kv-dtype", "int4", "--block-size", "32")
    assert found["bytes_per_token"] == 131_072 // 4
    assert found["bytes_per_block"] == 131_072 // 4 * 32


def test_the_policy_of_windowed_layers_is_stated() -> None:
    path = str(DATA / "gpt-oss-20b.json")
    assert "policy full" in run(path).stdout
    assert "16 bits assumed" in run(path).stdout
    full, window = (report(path, "--context", "8192", "--policy", policy) for policy in ("full", "window"))
    assert 32 * full["bytes_per_sequence"] == 12 * GiB
    assert 32 * window["bytes_per_sequence"] == 6_543_114_240


def test_a_distribution_takes_the_mean_of_the_blocks(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("1\n31\n")
    arguments = ("llama-3-8b", "--memory", "32GiB", "--weights", "0B")
    assert report(*arguments, "--lengths", str(file))["sequences_paged"] == 32 * GiB // (3 * GiB // 1024)
    assert report(*arguments, "--mean-tokens", "16")["sequences_paged"] == 32 * GiB // (2 * GiB // 1024)
    assert read_lengths("100-103") == [100, 101, 102, 103]
    kv = from_config(KNOWN["llama-3-8b"])
    assert mean_bytes(kv, [1, 31], 16) == 1.5 * kv.bytes_per_block(16)


def test_which_gpu_for_50_users_at_4k_in_one_command() -> None:
    done = run("llama-3-8b", "--users", "50", "--context", "4096")
    assert done.exit_code == 0
    assert re.search(r"50 users of 4,096\s+25 GiB", done.stdout)
    assert re.search(r"smallest GPU\s+48 GB", done.stdout)
    found = report("llama-3-8b", "--users", "50", "--context", "4096")["users"]
    assert found["kv_bytes"] == 25 * GiB
    assert {card["gb"]: card["cards"] for card in found["cards"]}[24] == 2


@pytest.mark.parametrize("users", [1, 10, 100, 1000])
def test_the_cards_named_hold_the_need_and_fewer_do_not(users: int) -> None:
    config, lengths = KNOWN["llama-3-70b"], [8192]
    weights = weight_bytes(config)
    for card in users_report(config, users, lengths, weights, 16)["cards"]:
        for count in (1, 2, 4, 8):
            kv = from_config(config, tensor_parallel=count)
            need = weights / count + users * kv.bytes_for(8192, 16)
            assert (need <= 0.9 * card["gb"] * GB) == (count >= card["cards"])


def test_no_card_is_said_so() -> None:
    assert "none of up to 8 GPUs" in run("llama-3-70b", "--users", "100000").stdout


# ------------------------------------------------------------------------------------------ bad input

BAD = [
    (("nobody/nothing",), "config = 'nobody/nothing'.*llama-3-8b"),
    (("llama-3-8b", "--memory", "80G"), "--memory: size = '80G'.*GiB"),
    (("llama-3-8b", "--memory", "-80GB"), "--memory"),
    (("llama-3-8b", "--memory", "8GB"), "memory = 8,000,000,000 B.*no room"),
    (("llama-3-8b", "--memory", "80GB", "--weights", "heavy"), "--weights: size = 'heavy'"),
    (("llama-3-8b", "--memory", "80GB", "--overhead", "10%"), "--overhead: size = '10%'"),
    ((str(DATA / "deepseek-v3.json"), "--memory", "80GB"), "--weights auto: .*give their size"),
    (("llama-3-8b", "--context", "0"), "context = 0"),
    (("llama-3-8b", "--context", "many"), "--context"),
    (("llama-3-8b", "--block-size", "0"), "block-size = 0"),
    (("llama-3-8b", "--tp", "3"), "tensor_parallel = 3"),
    (("llama-3-8b", "--tp", "0"), "tensor_parallel = 0"),
    (("llama-3-8b", "--kv-dtype", "fp12"), "kv_dtype = 'fp12'.*int4"),
    (("llama-3-8b", "--policy", "none"), "policy = 'none'"),
    (("llama-3-8b", "--users", "0"), "users = 0"),
    (("llama-3-8b", "--mean-tokens", "300"), "need --memory or --users"),
    (("llama-3-8b", "--memory", "80GB", "--mean-tokens", "0"), "mean-tokens = 0"),
    (("llama-3-8b", "--memory", "80GB", "--mean-tokens", "9000"), "9000: more than the context of 8192"),
    (("llama-3-8b", "--memory", "80GB", "--lengths", "2000-100"), "lengths = '2000-100'"),
    (("llama-3-8b", "--memory", "80GB", "--lengths", "0-3"), "lengths = '0-3'"),
    (("llama-3-8b", "--memory", "80GB", "--lengths", "1-99999999999"), "ends below 10,000,000"),
    (("llama-3-8b", "--memory", "80GB", "--lengths", "1-3", "--mean-tokens", "2"), "not both"),
    ((str(DATA / "gpt-j-6b.json").replace("gpt-j", "gpt-k"),), "no such file"),
    ((str(DATA / "gemma-3-27b.json"),), "context: the config declares none"),
    (("llama-3-8b", "--colour", "blue"), "colour"),
    ((), "(?i:config)"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: " ".join(value)[-40:] or "nothing")
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["size", *arguments])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    assert re.fullmatch(rf"paged-kv: [^\n]*{message}[^\n]*\n", err, re.DOTALL), err


def test_a_broken_config_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("", "{", "[]", '{"num_hidden_layers": "x"}', "\x00\xff"):
        file.write_text(text, encoding="latin-1")
        done = in_a_process("size", str(tmp_path))
        assert done.returncode == 2, done
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1, done.stderr


# ------------------------------------------------------------------------------------------ the program


def test_the_program_answers_in_a_process_of_its_own() -> None:
    done = in_a_process("size", "llama-3-8b", "--memory", "80GB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "131,072" in done.stdout
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


def test_help_names_the_command_and_its_options() -> None:
    done = in_a_process("--help")
    assert done.returncode == 0
    assert "size" in done.stdout
    options = in_a_process("size", "--help").stdout
    for option in ("memory", "weights", "context", "mean-tokens", "block-size", "tp", "kv-dtype", "users", "json"):
        assert f"--{option}" in options


def test_the_version_is_shown() -> None:
    done = in_a_process("--version")
    assert re.fullmatch(r"paged-kv \d+\.\d+\.\d+\S*\n", done.stdout)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """Under half a second of processor time, the interpreter's own start included."""
    code = (
        "import sys, time\n"
        "from paged_kv.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'torch', 'transformers', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "print(time.process_time(), sorted(heavy), file=sys.stderr)\n"
    )
    best = 10.0
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, heavy = done.stderr.split(maxsplit=1)
        assert heavy.strip() == "[]"
        best = min(best, float(seconds))
        if best < 0.5:
            break
        time.sleep(1)
    assert best < 0.5


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", ["--help"], "cli"),
        ("typer", ["generate", "hello"], "cli"),
        ("rich", ["size", "llama-3-8b"], "cli"),
        ("torch", ["generate", "hello", "--model", "random:llama"], "model"),
        ("transformers", ["generate", "hello", "--model", "random:llama"], "model"),
    ],
)
def test_a_package_that_is_missing_is_one_line_with_the_way_to_get_it(
    missing: str, arguments: list[str], extra: str
) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from paged_kv.command import start; start(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.stderr == f"paged-kv: {missing} is not installed; in the repository: pip install -e '.[{extra}]'\n"
    assert (done.returncode, done.stdout) == (2, "")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "paged_kv", "--help"], capture_output=True, text=True, check=True)
    assert "paged-kv" in done.stdout
    assert "generate" in done.stdout


def test_the_program_starts_where_nothing_need_be_installed() -> None:
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    module, _, function = scripts["scripts"]["paged-kv"].partition(":")
    assert (module, function) == ("paged_kv.command", "start")
    assert EXTRAS.keys() & {"typer", "rich", "torch", "transformers"}
    assert set(EXTRAS.values()) <= set(scripts["optional-dependencies"])
