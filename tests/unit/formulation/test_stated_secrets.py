"""Secrets among the variables and words of jobs: which are refused, and which texts pass."""

from __future__ import annotations

import pytest

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.launch import LaunchSpec
from tessera.service.server.convert.jobs import to_job_spec
from tessera.v1 import estimates_pb2, jobs_pb2, launch_pb2

LETTERS = "abcdefghijklmnopqrstuvwxyzabcdefgh"
HEX = "0f9a8b7c6d5e4f30" * 2

SECRETS = [
    ("HF_TOKEN", "hf" + "_" + LETTERS),
    ("X", "hf" + "_" + LETTERS),
    ("X", "AKIA" + "ABCDEFGH12345678"),
    ("X", "sk" + "-" + HEX),
    ("X", "postgresql://ana:" + "pass" + "@host/db"),
    ("HF_TOKEN", LETTERS),
    ("my-token", "abc123"),
    ("WANDB_API_KEY", HEX),
    ("AWS_SECRET_ACCESS_KEY", "x/y+z"),
    ("DB_PASSWORD", "123456"),
    ("PGPASSWORD", "hunter2"),
    ("PASSWORD_OF_THE_LAB", "hunter2"),
    ("CLIENT_SECRET", "xyzzy"),
    ("SORT_KEY", HEX),
    ("AWS_SECRET_ACCESS_KEY", "/" + "aB3" * 13),
    ("DB_PASS", "hunter2"),
    ("MYSQL_PWD", "hunter2"),
]
HARMLESS = [
    ("TOKENIZERS_PARALLELISM", "false"),
    ("MASTER_KEY_FILE", "/x"),
    ("HF_TOKEN_PATH", "/home/ana/token"),
    ("HF_TOKEN", "/run/secrets/hf"),
    ("HF_TOKEN", ""),
    ("HF_TOKEN", "$HF_TOKEN"),
    ("USE_AUTH_TOKEN", "true"),
    ("PAD_TOKEN", "<pad>"),
    ("EOS_TOKEN", "end"),
    ("MASK_TOKEN", "[MASK]"),
    ("IMAGE_TOKEN", "7"),
    ("MAX_TOKENS", "4096"),
    ("SORT_KEY", "name"),
    ("KEY", "x"),
    ("SECRET_NAME", "wandb"),
    ("PASSWORD_ENV", "DB_PASS"),
    ("AWS_ACCESS_KEY_ID", "x"),
    ("MONKEY", "x"),
    ("RUN_ID", HEX),
    ("CHECKPOINT", f"s3://bucket/{HEX}/step"),
    ("GIT_COMMIT", HEX + "01234567"),
    ("NCCL_DEBUG", "INFO"),
    ("PWD", "data"),
    ("USE_PASSWORD", "0"),
    ("INITIALIZER_TOKEN", "toy"),
    ("NEXT_TOKEN", "logits.argmax(-1)"),
    ("HF_TOKEN", "`cat"),
    ("STATE_DICT_KEY", "model_state_dict_v2_final"),
    ("CACHE_KEY", "bert-large-uncased-seq512"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "creds.json"),
]


def submit(**stated: object) -> LaunchSpec:
    """Return the launch of a submitted job. Raises InvalidInput."""
    command = stated.pop("command", ["train.py"])
    job = jobs_pb2.Job(
        workload=estimates_pb2.Workload(model="bert", global_batch=8),
        iterations=1,
        requested_gpus=1,
        labels=stated.pop("labels", {}),  # type: ignore[arg-type]
        command=command,  # type: ignore[arg-type]
        launch=launch_pb2.Launch(**stated),  # type: ignore[arg-type]
    )
    return to_job_spec("job", "c", "j", job).launch


@pytest.mark.parametrize(("name", "value"), SECRETS)
def test_a_secret_is_refused_wherever_a_job_states_it_and_never_repeated(
    name: str, value: str
) -> None:
    places: list[tuple[str, dict[str, object]]] = [
        ("job.command[2]", {"command": ["train.py", f"--{name}", value]}),
        ("job.command[1]", {"command": ["train.py", f"--{name}={value}"]}),
        ("job.command[2]", {"command": ["bash", "-c", f"{name}='{value}' python train.py"]}),
        ("job.launch.staging_command[1]", {"staging_command": ["get", f"{name}={value}"]}),
    ]
    if "-" not in name:
        places.append((f"job.launch.env[{name}]", {"env": {name: value}}))
    for field, stated in places:
        with pytest.raises(InvalidInput) as refused:
            submit(**stated)
        assert refused.value.field == field
        assert "--secret" in str(refused.value)
        assert value not in str(refused.value)


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_what_is_no_secret_is_accepted_wherever_a_job_states_it(name: str, value: str) -> None:
    launch = submit(
        command=["train.py", f"--{name.lower()}", value, f"{name}={value}"],
        env={name: value},
        staging_command=["get", f"--{name}={value}"],
    )
    assert launch.env == {name: value}


def test_a_secret_is_no_label_and_no_name_of_a_file() -> None:
    token = "hf" + "_" + LETTERS
    with pytest.raises(InvalidInput, match=r"job\.labels: hold a secret") as refused:
        submit(labels={"a": token})
    assert token not in str(refused.value)
    secret = launch_pb2.Secret(variable="HF_TOKEN", name=token)
    with pytest.raises(InvalidInput, match="must be the name of a file on the nodes") as refused:
        submit(secrets=[secret])
    assert token not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "train.py --api-key abc",
        "login --token 'abc'; train.py",
        'train.py --config \'{"api_key": "abc"}\'',
        "Endpoint=x;AccountKey=abc;Suffix=y",
        "curl -H 'Authorization: Bearer abc' https://x",
    ],
)
def test_a_secret_within_a_text_is_refused(text: str) -> None:
    for stated in ({"command": ["bash", "-c", text]}, {"env": {"TEXT": text}}):
        with pytest.raises(InvalidInput, match="looks like a secret"):
            submit(**stated)


@pytest.mark.parametrize(
    "text",
    [
        "train.py --token --api-key",
        'curl -H "Authorization: Bearer $TOKEN" https://x',
        "train.py --token $TOKEN --api-base https://x --eos-token '</s>'",
        '{"pad_token": "[PAD]", "sort_key": "length"}',
        'for step in data: next_token = sample(x); key = "x"',
    ],
)
def test_a_text_without_secrets_is_accepted(text: str) -> None:
    assert submit(command=["bash", "-c", text], env={"TEXT": text}).env
