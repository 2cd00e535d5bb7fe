"""What is left out of an archive for a bug report."""

import time
from itertools import pairwise

import pytest

from unified.cli.diagnose import LEFT_OUT, cleaned, cleaner, settings_text

ENV = {
    "HF_TOKEN": "hf_abcdefgh",
    "MY_PASSWORD": "short",
    "QUOTED_TOKEN": 'abc"def12',
    "LINES_SECRET": "two\nlines\n",
    "UNIFIED_MASTER": "tcp://h:1",
    "TRAINER_API_TOKEN": "t" * 20,
    "UNIFIED_KEY_FILE": "/etc/unified/key",
    "HOME": "/root",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login with hf_abcdefgh now", f"login with {LEFT_OUT} now"),
        ("token=abcd1234 step=7", f"token={LEFT_OUT} step=7"),
        ('{"aws_secret_access_key": "AKIA/x+y=="}', f'{{"aws_secret_access_key": "{LEFT_OUT}"}}'),
        ("Authorization: Bearer eyJhbGciOi.J9", f"Authorization: Bearer {LEFT_OUT}"),
        ("s3 at https://me:hunter22@store/x", f"s3 at https://me:{LEFT_OUT}@store/x"),
        ("tokens_per_s 950.3, step 7: loss 0.5", "tokens_per_s 950.3, step 7: loss 0.5"),
        ("the password is short", "the password is short"),
        (r'{"reason": "{\"token\": \"hunter2secret\"}"}', rf'{{"reason": "{{\"token\": \"{LEFT_OUT}\"}}"}}'),
        (r'{"a":"x abc\"def12"}', f'{{"a":"x {LEFT_OUT}"}}'),
        ("Q is 'two\\nlines'", f"Q is '{LEFT_OUT}'"),
        ("--api-key sk-12345678 --hf_token hf_abcd -v", f"--api-key {LEFT_OUT} --hf_token {LEFT_OUT} -v"),
        ("['--api-key', 'sk-12', '--use-token', '--no']", f"['--api-key', '{LEFT_OUT}', '--use-token', '--no']"),
        ("--tokenizer /models/one", "--tokenizer /models/one"),
        ("x-api-key: abcdefgh", f"x-api-key: {LEFT_OUT}"),
        ('password: "ab cd efgh", step: 7', f'password: "{LEFT_OUT}", step: 7'),
        (r'{"token": "ab\"cd efgh", "step": 7}', f'{{"token": "{LEFT_OUT}", "step": 7}}'),
        ("token: Bearer abcdefgh refused", f"token: {LEFT_OUT} refused"),
        ("hf_" + "a1" * 10, LEFT_OUT),
        ("with sk-" + "a1" * 10, f"with {LEFT_OUT}"),
        ("AKIA" + "A1" * 8 + " is the key", f"{LEFT_OUT} is the key"),
        ("remote: ghp_" + "a1" * 18, f"remote: {LEFT_OUT}"),
        ("hf_hub_download(disk-0)", "hf_hub_download(disk-0)"),
    ],
)
def test_what_looks_like_a_secret_is_left_out(text: str, expected: str) -> None:
    assert cleaner(ENV)(text) == expected


UNITS = [".", "a", "-", "token", "token.", '"', "token: ", "a-", "://", "://x:", "bearer ", " ", "\\"]


def clean_s(text: str) -> float:
    """Return the processor time to clean a text: the least of three."""
    clean, times = cleaner({}), [time.process_time()]
    for _ in range(3):
        clean(text)
        times.append(time.process_time())
    return min(end - begin for begin, end in pairwise(times))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("end", ["", ":", ' token: "'])
def test_the_time_for_a_log_grows_with_its_length_alone(unit: str, end: str) -> None:
    """Eight times the length takes eight times as long; the square of that would be 64 times."""
    short, long = (unit * (nbytes // len(unit)) + end for nbytes in (4096, 32768))
    assert clean_s(long) < 24 * clean_s(short)


def test_without_secrets_nothing_is_changed() -> None:
    assert cleaner({})("a text") == "a text"


def test_texts_of_a_record_are_cleaned_before_it_is_json() -> None:
    record = {"reason": 'with {"password": "hunter22"}', "at": [1.5, 'an abc"def12'], "api_key": "0123", "tokens": 7}
    found = cleaned(record, cleaner(ENV))
    expected = {"reason": f'with {{"password": "{LEFT_OUT}"}}', "at": [1.5, f"an {LEFT_OUT}"]}
    assert found == {**expected, "api_key": LEFT_OUT, "tokens": 7}


def test_settings_are_ours_and_have_no_secrets() -> None:
    assert settings_text(ENV).splitlines() == [
        f"TRAINER_API_TOKEN={LEFT_OUT}",
        "UNIFIED_KEY_FILE=/etc/unified/key",
        "UNIFIED_MASTER=tcp://h:1",
    ]
