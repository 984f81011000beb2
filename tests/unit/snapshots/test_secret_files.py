"""Which files of a tree are taken for secrets: the table of names, and a look into the few that it leaves open."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import NotPossible
from runtime.snapshots.secret_files import find_secret_files, holds_secret
from runtime.snapshots.snapshot import SnapshotRules, make_snapshot, survey

KEY = f"-----BEGIN RSA {'PRIVATE'} KEY-----\nabc\n"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nabc\n"
SERVICE_ACCOUNT = '{"type": "service_account", "private_key": "' + KEY.replace("\n", "\\n") + '"}'

BY_NAME = [
    *(".env", "prod.env", ".env.local", ".env.production", ".ENV", "a/.env.prod.local", ".env.keys"),
    *("id_rsa", "keys/id_ed25519", "lab_id_rsa", "id_ecdsa_sk", ".ssh/lab", "a/.ssh/id_lab"),
    *("server.key", "a.p12", "A.PFX", "a.ppk", "a.jks", "lab.kdbx"),
    *(
        ".netrc",
        "_netrc",
        "home/.netrc",
        ".pypirc",
        ".git-credentials",
        ".config/git/credentials",
        ".pgpass",
        ".my.cnf",
    ),
    *(".htpasswd", ".vault-token", ".dockercfg", ".boto", ".s3cfg", ".config/rclone/rclone.conf", ".databrickscfg"),
    *("credentials.json", "application_default_credentials.json", ".pulumi/credentials.json", "credentials.tfrc.json"),
    *(".aws/credentials", ".kube/config", "kubeconfig", "deploy/lab-kubeconfig.yaml", ".config/gcloud/credentials.db"),
    *(".huggingface/token", ".cache/huggingface/token", "huggingface/stored_tokens", ".kaggle/kaggle.json"),
    *("terraform.tfstate", "infra/terraform.tfstate.backup", ".streamlit/secrets.toml", ".config/gh/hosts.yml"),
]
OPEN_BY_NAME = [
    *(".env.example", ".env.template", ".env.sample", ".env.local.example", "example.env", ".env.vault", ".env.dist"),
    *(
        "id_rsa.pub",
        ".ssh/id_ed25519.pub",
        ".ssh/config",
        ".ssh/known_hosts",
        "environment.yml",
        "env",
        "settings.env.py",
    ),
    *(
        "tokenizer.json",
        "special_tokens_map.json",
        "tokens.txt",
        "credentials.py",
        "keyboard.py",
        "monkey.json",
        "kube/config",
    ),
    *("aws/credentials.md", "token", "keys", "keynote.md", "test_netrc.py", "config.json", "hosts.yml", "terraform.tf"),
]
BY_CONTENT = [
    ("certs/server.pem", KEY, CERTIFICATE),
    ("certs/chain.pem", CERTIFICATE + KEY, CERTIFICATE + CERTIFICATE),
    (".npmrc", "//registry.npmjs.org/:_authToken=npm_abc\n", "//registry.npmjs.org/:_authToken=${NPM_TOKEN}\n"),
    (".npmrc", "_auth = abc\n", "registry=https://npm.lab.org/\n# _auth=abc\n"),
    (
        ".envrc",
        "use flake\nexport HF_TOKEN=hf_abc\n",
        "use flake\nexport HF_TOKEN=$(pass hf)\nexport OMP_NUM_THREADS=4\n",
    ),
    (".docker/config.json", '{"auths": {"r": {"auth": "YWI="}}}', '{"credsStore": "gcloud", "auths": {"r": {}}}'),
    (".aws/config", "[default]\naws_secret_access_key = abc\n", "[default]\nregion = us-west-2\n"),
    ("pip.conf", "index-url = https://me:pw@pypi.lab.org/\n", "index-url = https://me:${PW}@pypi.lab.org/\n"),
    ("lab-123456-0123456789ab.json", SERVICE_ACCOUNT, "{}"),
    ("conf/service_account.json", SERVICE_ACCOUNT, '{"private_key": "your-private-key"}'),
    ("gcp-key.json", SERVICE_ACCOUNT, '{"keys": [1, 2]}'),
    ("sa.json", SERVICE_ACCOUNT, '{"loss": 1}'),
    ("token.json", '{"refresh_token": "1//0abcdefghijklmnop"}', '{"token": "<pad>"}'),
    ("client_secret_1.json", '{"client_secret": "GOCSPX-abcdefghij"}', '{"client_secret": "YOUR SECRET"}'),
]


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def find(folder: Path) -> list[str]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return find_secret_files(str(folder), [(name, (folder / name).lstat()) for name in names])


@pytest.mark.parametrize("name", BY_NAME)
def test_file_with_the_name_of_a_secret_is_refused_unless_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, "main.py", "")
    write(tmp_path, name, "")

    with pytest.raises(NotPossible, match="looks like a secret") as refused:
        make_snapshot(tmp_path)
    made = make_snapshot(tmp_path, SnapshotRules(secrets=[name]))

    assert f"`{name}`" in refused.value.message
    assert refused.value.hint == "add it to .gitignore or .runtimeignore, and pass secrets by reference"
    assert made.names == tuple(sorted(["main.py", name]))


@pytest.mark.parametrize("name", OPEN_BY_NAME)
def test_file_whose_name_only_resembles_a_secrets_is_taken(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, KEY)

    assert make_snapshot(tmp_path).names == (name,)


@pytest.mark.parametrize(("name", "secret", "plain"), BY_CONTENT)
def test_file_of_a_name_for_both_is_judged_by_its_content(tmp_path: Path, name: str, secret: str, plain: str) -> None:
    write(tmp_path, f"secret/{name}", secret)
    write(tmp_path, f"plain/{name}", plain)

    assert find(tmp_path) == [f"secret/{name}"]


def test_link_is_not_followed_to_judge_its_content(tmp_path: Path) -> None:
    write(tmp_path, "outside/server.pem", KEY)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "server.pem").symlink_to("../outside/server.pem")

    assert make_snapshot(tmp_path / "tree").names == ("server.pem",)


def test_file_that_cannot_be_judged_is_left_to_the_snapshot(tmp_path: Path) -> None:
    write(tmp_path, "gone.pem", KEY)
    files = survey(tmp_path, SnapshotRules(secrets=["gone.pem"]))
    (tmp_path / "gone.pem").unlink()

    assert find_secret_files(str(tmp_path), files) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("api_key = 'abc'\n", True),
        ('"password": "abc",\n', True),
        ("os.environ['HF_TOKEN'] = 'abc'\n", True),
        ("password: abc\n", True),
        ("export HF_TOKEN=abc\n", True),
        ("see hf_" + "A" * 30 + "\n", True),
        (KEY, True),
        ("token = tokenizer.next_token()\n", False),
        ("def encode(token: str, pad_token='<pad>') -> int:\n", False),
        ("num_tokens = 5\nkey_dim: 64\ntoken_budget: 4096\n", False),
        ("password: ${PASSWORD}\n", False),
        ("use the token of your account\n", False),
    ],
)
def test_text_with_a_secret_literal_is_told_from_code_about_tokens(text: str, expected: bool) -> None:
    assert holds_secret(text) is expected
