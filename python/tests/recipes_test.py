"""Every recipe resolves under its topology and needs what its first lines say."""

import json
import re
import subprocess

import pytest

from python.tests.conftest import ROOT, assert_one_sentence

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def said(recipe, name: str) -> str:
    found = re.search(rf"^# {name}: (\S+)", recipe.read_text(), re.M)
    assert found, f"{recipe.name}: no line '# {name}: ..' among its first comments"
    return found.group(1)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_resolves_and_needs_what_it_says(binary, environment, tmp_path, recipe):
    nodes, each = map(int, said(recipe, "topology").split("x"))
    launcher = {
        "RANK": "0",
        "WORLD_SIZE": str(nodes * each),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
    }

    def run(*command: object, env: dict[str, str]):
        return subprocess.run(
            [str(binary), *map(str, command)],
            cwd=tmp_path,
            env={**environment, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    resolved = run(
        "train", "--config", recipe, "--dry-run", env=launcher if nodes * each > 1 else {}
    )
    assert resolved.returncode == 0, resolved.stderr
    result = run(
        "plan", "--config", recipe, "--topology", said(recipe, "topology"), "--json", env={}
    )
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["parameters"] == int(said(recipe, "parameters"))
    gigabytes = said(recipe, "plan")
    last_digit = 10.0 ** -len(gigabytes.partition(".")[2])
    assert plan["plan"]["device_bytes"] / 1e9 == pytest.approx(
        float(gigabytes), abs=0.51 * last_digit
    )
    assert plan["plan"]["fits"]
    assert plan["plan"]["cp_size"] * plan["plan"]["dp_size"] == nodes * each
    total = sum(item["bytes"] for item in plan["plan"]["memory"].values() if not item["on_host"])
    assert total == plan["plan"]["device_bytes"]
    assert plan["plan"]["step_s"] == pytest.approx(sum(plan["plan"]["seconds"].values()))
    steps = [split["step_s"] for split in plan["splits"] if split["fits"]]
    assert steps == sorted(steps), "fastest first"
    assert any(split["cp_size"] == plan["plan"]["cp_size"] for split in plan["splits"])


def test_plan_says_what_binds_and_bad_input_gets_one_sentence(binary, environment, tmp_path):
    recipe = ROOT / "recipes" / "qwen2.5-3b-512k.toml"

    def plan(*arguments: object):
        return subprocess.run(
            [str(binary), "plan", *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def binds(*arguments: object) -> dict:
        result = plan("--config", recipe, "--topology", "4x8", "--json", *arguments)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)["plan"]

    assert binds("--gpu-gb", 10)["binds"].startswith("memory")
    assert not binds("--gpu-gb", 10)["fits"]
    assert binds(
        "--inter-gb-per-s", 0.5, "--set", "attention.ring=flat", "--set", "parallel.zero=0"
    )["binds"].endswith("its links")
    assert binds("--density", 1)["binds"] == "time: attention backward, its kernels"
    assert binds("--matmul-tflops", 1)["binds"] == "time: matmul"
    dense = binds("--set", "attention.pattern=dense")
    assert dense["seconds"]["index"] == 0
    assert dense["bytes"]["columns"] == 0
    text = plan("--config", recipe, "--topology", "4x8").stdout
    assert "3085938688 parameters" in text
    assert "binds: " in text
    for arguments, parts in [
        ((), ("--config",)),
        (("--config", recipe), ("--topology",)),
        (("--config", recipe, "--topology", "4by8"), ("4by8", "NODESxRANKS")),
        (("--config", recipe, "--topology", "4x7"), ("cp_size",)),
        (("--config", recipe, "--topology", "4x8", "--density", "0"), ("--density",)),
        (("--config", recipe, "--topology", "4x8", "--matmul-tflops", "-1"), ("--matmul-tflops",)),
        (("--config", recipe, "--topology", "4x8", "--gpu-gb", "0"), ("--gpu-gb",)),
        (("--config", recipe, "--topology", "4x8", "--set", "no"), ("--set", "key=value")),
        (("--config", recipe, "--topology", "4x8", "--set", "train.seqlen=1"), ("train.seqlen",)),
        (("--config", "absent.toml", "--topology", "4x8"), ("absent.toml",)),
        (("--config", recipe, "--topolgy", "4x8"), ("--topolgy", "--topology")),
    ]:
        assert_one_sentence(plan(*arguments), *parts)
