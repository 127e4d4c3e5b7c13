"""Credentials do not leave in URLs, texts or settings."""

from __future__ import annotations

import pytest

from forage_runtime.settings import load_settings
from forage_runtime.text.redaction import redact_settings, redact_text, redact_url

SECRET = "S3cr3t"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"redis://user:{SECRET}@host:6379/0", "redis://***@host:6379/0"),
        (f"rediss+sentinel://:{SECRET}@a:1,b:2/master", "rediss+sentinel://***@a:1,b:2/master"),
        (f"redis://:{SECRET}/with@slash@host:1/0", "redis://***@host:1/0"),
        (f"redis://:{SECRET}#x?y\"z'@host:1/0", "redis://***@host:1/0"),
        (f"redis://host:1/0?password={SECRET}&db=2", "redis://host:1/0?password=***&db=2"),
        ("redis://host:1/0?ssl_keyfile=/etc/key.pem", "redis://host:1/0?ssl_keyfile=/etc/key.pem"),
        (f"https://{SECRET}@host/path", "https://***@host/path"),
        (f"HTTPS://u:a@b{SECRET}@host/path", "HTTPS://***@host/path"),
        (f"simplecache::s3://u:{SECRET}@bucket/a", "simplecache::s3://***@bucket/a"),
        (
            f"https://b.s3.amazonaws.com/o?X-Amz-Signature={SECRET}&x-amz-credential={SECRET}&versionId=3",
            "https://b.s3.amazonaws.com/o?X-Amz-Signature=***&x-amz-credential=***&versionId=3",
        ),
        (f"https://a.blob/x?sv=1&sig={SECRET}%3D&se=2", "https://a.blob/x?sv=1&sig=***&se=2"),
        (f"https://h/x?to%6ben={SECRET}", "https://h/x?to%6ben=***"),
        (f"https://h/x#access_token={SECRET}", "https://h/x#access_token=***"),
        (f"s3://AKIA:{SECRET}/a+b/c@bucket/x", "s3://***@bucket/x"),
        (f"http://u:{SECRET}?#/@host/path", "http://***@host/path"),
        ("http://h:8080/a@b?c=d", "http://h:8080/a@b?c=d"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("https://h/a@b/c?page=2", "https://h/a@b/c?page=2"),
        ("unix:///tmp/redis.sock", "unix:///tmp/redis.sock"),
        ("s3://bucket/runs", "s3://bucket/runs"),
        ("models/tiny-policy", "models/tiny-policy"),
    ],
)
def test_a_url_keeps_all_but_its_credentials(url: str, expected: str) -> None:
    assert redact_url(url) == expected
    assert redact_url(expected) == expected


def test_texts_lose_the_credentials_of_every_url_and_header() -> None:
    text = (
        f'no answer from "https://u:{SECRET}@h/a?key={SECRET}" or redis://:{SECRET}@h:1, mail me@example.org; '
        f"Authorization: Bearer {SECRET}; {{'authorization': 'Basic {SECRET}', 'x': 1}}"
    )
    assert redact_text(text) == (
        'no answer from "https://***@h/a?key=***" or redis://***@h:1, mail me@example.org; '
        "Authorization: Bearer *** {'authorization': 'Basic ***', 'x': 1}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"no answer from redis://:{SECRET}\"a'b`c<d@h:1 now", "no answer from redis://***@h:1 now"),
        (f"{{'url': 'https://u:{SECRET}'x@h/y'}}", "{'url': 'https://***@h/y'}"),
        ('{"a":"redis://h:1","b":"me@example.org"}', '{"a":"redis://h:1","b":"me@example.org"}'),
        ("<https://h/a> <me@example.org>", "<https://h/a> <me@example.org>"),
        (
            f"[(b'authorization', b'Bearer {SECRET}'), (b'a', b'b')]",
            "[(b'authorization', b'Bearer ***'), (b'a', b'b')]",
        ),
        (f"{{'authorization': ['Bearer {SECRET}']}}", "{'authorization': ['Bearer ***']}"),
        (f"Authorization: Token {SECRET}", "Authorization: Token ***"),
        (f"x-api-key: {SECRET}", "x-api-key: ***"),
    ],
)
def test_a_text_loses_credentials_however_they_are_quoted(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert redact_text(expected) == expected


def test_settings_lose_credentials_wherever_they_stand_and_can_be_read_again() -> None:
    overrides = [
        f"redis.url=redis://u:{SECRET}@h:1/0",
        f"trainer.upload_url=https://u:{SECRET}@h/b?sig={SECRET}",
        f"trainer.publish.uri=s3://u:{SECRET}@b/runs",
    ]
    settings = load_settings(None, overrides)
    tree = redact_settings(settings.model_dump(mode="json"))
    assert SECRET not in repr(tree)
    assert tree["redis"]["url"] == "redis://***@h:1/0"
    again = load_settings(None, [f"redis.url={tree['redis']['url']}"])
    assert again.redis.timeout_s == settings.redis.timeout_s


def test_values_are_hidden_by_their_name_and_files_are_not() -> None:
    tree = {
        "params": {"api_key": SECRET, "judge_token": SECRET, "password": SECRET, "max_tokens": 3, "empty_token": ""},
        "files": {"auth_token_file": "/etc/token", "key": "/etc/key.pem", "api_key_env": "KEY"},
        "list": [f"https://u:{SECRET}@h", 3, None, True],
    }
    redacted = redact_settings(tree)
    assert redacted == {
        "params": {"api_key": "***", "judge_token": "***", "password": "***", "max_tokens": 3, "empty_token": ""},
        "files": tree["files"],
        "list": ["https://***@h", 3, None, True],
    }
    assert tree["params"]["api_key"] == SECRET  # type: ignore[index]


@pytest.mark.parametrize(
    "piece",
    ["a", "redis://", "http://", "?a", "authorization:", "a@", "://", "?key=", "http://'a", "http://a:", "x://a'b"],
)
def test_long_texts_take_time_in_proportion(piece: str) -> None:
    redact_text(piece * (200_000 // len(piece)))
