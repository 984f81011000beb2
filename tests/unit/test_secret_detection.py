"""Which names with which values are taken for secrets, and which are not."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.secret_detection import (
    find_secret,
    find_secret_anywhere,
    find_secret_argument,
    find_secret_in_shell,
    is_secret,
    looks_secret,
)

SECRETS: list[tuple[str, Any]] = [
    ("HF_TOKEN", "hf_abc"),
    ("token", "abc"),
    ("hf-token", "abc"),
    ("hfToken", "abc"),
    ("model.api_key", "abc"),
    ("apiKey", "abc"),
    ("OPENAI_API_KEY", "sk-abc"),
    ("AWS_ACCESS_KEY_ID", "AKIA"),
    ("AWS_SECRET_ACCESS_KEY", "a/b+c"),
    ("client_secret", "abc"),
    ("db_password", "hunter2"),
    ("password", "12345678"),
    ("password", 12345678),
    ("api_key", "1234567890123456789012"),
    ("credentials", "user:abc"),
    ("token", ["<pad>", "abc"]),
    ("image_token_secret", "abc"),
]
PLAIN: list[tuple[str, Any]] = [
    ("num_tokens", "5"),
    ("num_tokens", "many"),
    ("max_new_tokens", 128),
    ("key_dim", "64"),
    ("key", "abc"),
    ("token_budget", "4096"),
    ("token_budget", "large"),
    ("TOKEN_LIMIT", "1e6"),
    ("token", 4),
    ("token", "1e-3"),
    ("api_key", True),
    ("use_token", "false"),
    ("token", None),
    ("token", ""),
    ("pad_token", "PAD"),
    ("eos_token", "</s>"),
    ("mask-token", "[MASK]"),
    ("token_type", "bpe"),
    ("initializer_token", "toy"),
    ("trigger-token", "sks"),
    ("token_reduction", "mean"),
    ("token_norm", "layer"),
    ("tokenizer", "gpt2"),
    ("token", "<|endoftext|>"),
    ("token", "{token}"),
    ("HF_TOKEN", "$HF_TOKEN"),
    ("HF_TOKEN", "env://HF_TOKEN"),
    ("HF_TOKEN_PATH", "/lab/token"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "/lab/key.json"),
    ("password_length", "12"),
    ("secretary", "abc"),
    ("lr", "1e-3"),
]


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_value_of_a_secrets_name_is_a_secret(name: str, value: object) -> None:
    assert is_secret(name, value)
    assert looks_secret(name)


@pytest.mark.parametrize(("name", "value"), PLAIN)
def test_amounts_flags_references_and_tokens_of_text_are_no_secrets(name: str, value: object) -> None:
    assert not is_secret(name, value)


ARGUMENTS = [
    (["python", "train.py", "--token=abc"], "--token"),
    (["python", "train.py", "--hf-token", "abc"], "--hf-token"),
    (["python", "train.py", "+model.api_key=abc"], "+model.api_key"),
    (["env", "HF_TOKEN=abc", "python"], "HF_TOKEN"),
    (["docker", "run", "-e", "HF_TOKEN=abc"], "HF_TOKEN"),
    (["docker", "run", "--env=HF_TOKEN=abc"], "HF_TOKEN"),
    (["sbatch", "--export=ALL,HF_TOKEN=abc"], "HF_TOKEN"),
    (["bash", "-c", "HF_TOKEN=abc python train.py"], "HF_TOKEN"),
    (["/bin/sh", "-ec", "cd x && python train.py --api-key 'abc'"], "--api-key"),
    (["python", "train.py", "--max-tokens", "5", "--token-budget=4096", "--key-dim", "64"], None),
    (["python", "train.py", "--use-token", "--lr", "1e-3"], None),
    (["python", "train.py", "--token"], None),
    (["runtime", "launch", "--secret", "HF_TOKEN=env://HF_TOKEN", "true"], None),
    (["docker", "build", "--secret", "id=pip,src=pip.conf"], None),
    (["docker", "build", "--secret", "HF_TOKEN=abc"], "HF_TOKEN"),
    (["train", "--secret", "YWJjZA=="], "--secret"),
    (["python", "train.py", "--eos-token", "</s>", "--pad-token=[PAD]"], None),
    (["python", "-c", "token = load(); token == 'x'"], None),
    (["python3.11", "-u", "-c", "token=load()"], None),
    (["train", "-c", "token=abc"], "token"),
    (["sh", "-c", 'test "$HF_TOKEN" = abc && train --token "$HF_TOKEN"'], None),
    (["sh", "-c", "export HF_TOKEN=$(cat token); it's"], None),
    (["bash", "-euxo", "pipefail", "-c", "HF_TOKEN=abc python train.py"], "HF_TOKEN"),
    (["bash", "--login", "-c", "cd x&&HF_TOKEN=abc python train.py"], "HF_TOKEN"),
    (["sh", "-c", "(HF_TOKEN=abc python train.py)"], "HF_TOKEN"),
    (["sh", "-c", "python train.py --token \\\n abc"], "--token"),
    (["sh", "-c", "HF_TOKEN+=abc"], "HF_TOKEN+"),
    (["sh", "-c", "python train.py --use_auth_token && echo done"], None),
    (["sh", "-c", "python train.py --use_auth_token | tee log; python --token\npython test.py"], None),
    (["train", "-token", "abc"], "-token"),
    (["train", "--config", '{"lr": 1, "hf_token": "abc"}'], "hf_token"),
    (["train", "wandb={api_key: abc}"], "api_key"),
    (["train", "--model", '{"pad_token": "<pad>", "token_type": "bpe"}'], None),
    (["curl", "https://lab/x?a=1&token=abc"], "token"),
    (["curl", "https://ada:pw@lab/x?token=abc"], "token"),
    (["train", "model/token=abc"], "token"),
    (["train", "hosts[0].token=abc"], "hosts[0].token"),
    (["login", "hf_" + 30 * "a"], "argument 2"),
    (["train", "hf_" + 30 * "a" + "=1"], "argument 2"),
    (["train", "--auth=Bearer ghp_" + 36 * "a"], "--auth"),
    (["python", "-c", "login('hf_" + 30 * "a" + "')"], "argument 3"),
    (["train", "--model", "sk-learn-pipeline-classifier-large", "hf_model/name"], None),
    (["train", "--hub_token_env", "HF_TOKEN", "--access_key_id_file", "x", "--token_list", "data/tokens.lst"], None),
    (
        ["train", "--eot_token", "x", "--sink_token=learned", "--token_abstraction", "TOK", "--cls_token_pos", "first"],
        None,
    ),
    (["echo", "token", "secret", "password"], None),
    (["train", "--prompt=the password is=secret"], None),
]


@pytest.mark.parametrize(("words", "expected"), ARGUMENTS)
def test_argument_with_a_secret_is_found_by_its_name(words: list[str], expected: str | None) -> None:
    assert find_secret_argument(words) == expected


def test_line_of_shell_is_read_as_its_words() -> None:
    assert find_secret_in_shell("module load cuda; export HF_TOKEN='abc'") == "HF_TOKEN"
    assert find_secret_in_shell("module load cuda; source /lab/token.sh") is None


def test_secret_in_nested_tables_is_found_by_its_path() -> None:
    assert find_secret({"lr": 1, "hub": {"login": [{"api_key": "abc"}]}}) == "hub.login.api_key"
    assert find_secret({"lr": 1, "tokens": {"pad_token": "<pad>", "count": 3}}) is None


def test_value_that_is_very_deep_is_looked_at_in_part() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    assert find_secret({"token": deep, "x": [{"y": deep}]}) is None
    assert find_secret_anywhere({"token": deep, "x": [{"y": deep}]}) is None
