"""URLs in settings: a login that would be read as another part is refused, in a sentence that quotes nothing of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forage_runtime.errors import SettingsError
from forage_runtime.settings import Settings, load_settings

SECRET = "S3cr3t"
SETTINGS = {
    "redis.url": "redis://{login}@host:1/0",
    "redis.payloads_url": "s3://{login}@bucket/groups",
    "rollout.engine.endpoint": "http://{login}@host/v1",
    "retriever.encoder.model": "http://{login}@host:8080",
    "retriever.rerank.model": "http://{login}@host:8080",
    "trainer.upload_url": "simplecache::https://{login}@host/runs",
    "trainer.publish.uri": "https://{login}@host/policies",
    "tracing.endpoint": "http://{login}@host:4317",
    "console.trace_url": "http://{login}@host/{{trace_id}}",
}
"""Every setting with a URL that can hold a login."""


def load(name: str, value: str) -> Settings:
    return load_settings(environ={f"FORAGE__{name.replace('.', '__').upper()}": f"'{value}'"})


@pytest.mark.parametrize(
    "login", [f":p@ss/w#{SECRET}", f"u:{SECRET}/x", f"u:x#{SECRET}", f"u:x?{SECRET}", f":{SECRET} x", f"u:/{SECRET}"]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_login_that_is_not_encoded_is_refused_without_showing_it(name: str, login: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting '{name}' .*not shown: .*percent-encode") as error:
        load(name, SETTINGS[name].format(login=login))
    assert not re.search(rf"{SECRET}|p@ss|w#", str(error.value))
    assert ("redis.password_file" in str(error.value)) == (name == "redis.url")


@pytest.mark.parametrize("name", SETTINGS)
def test_an_encoded_login_is_accepted(name: str) -> None:
    section: object = load(name, SETTINGS[name].format(login="u:p%40ss%2Fw%23rd"))
    for part in name.split("."):
        section = getattr(section, part)
    assert "u:p%40ss%2Fw%23rd@" in str(section)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@host:port/0",
        f"redis://:{SECRET}:6379",
        f"redis://:{SECRET}[@host:1",
        f"redis://:{SECRET}\u2100@host:1",
        f"redis+sentinel://:{SECRET}/x@a:1,b:2/master",
        f"redis+cluster://:{SECRET}#@a:1",
        f"unix://:{SECRET}/x@/tmp/redis.sock",
        f"redis:///{SECRET}@host:1",
        f"redis://:{SECRET * 60}#@host:1",
        f"u:{SECRET}@host:1",
        f":{SECRET}@host:1",
        f"redis:/u:{SECRET}@host:1",
        f"redis//:{SECRET}@host:1",
        f"//u:{SECRET}@host:1",
    ],
)
def test_no_error_of_a_redis_url_shows_its_login(url: str) -> None:
    with pytest.raises(SettingsError, match=r"setting 'redis.url' .*not shown") as error:
        load("redis.url", url)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("redis.url", "redis://u:p@ss@host:1/0"),
        ("redis.url", "redis://[::1]:6379/0"),
        ("redis.url", "rediss+sentinel://:x@a:1,b:2/master"),
        ("redis.url", "unix:///tmp/a@b.sock"),
        ("redis.url", "unix://u:p@/tmp/redis.sock"),
        ("trainer.upload_url", "https://host:80/a@b"),
        ("trainer.upload_url", "http://[::1]:80/a@b"),
        ("trainer.upload_url", "hf://datasets/a/b@main/x"),
        ("trainer.upload_url", "zip://a@b.csv::https://u:p@host/x.zip"),
        ("redis.payloads_url", "s3://bucket/a@b#c"),
        ("redis.payloads_url", "/data/a:b@c"),
        ("redis.payloads_url", "file:///a:b@c#d"),
    ],
)
def test_an_at_sign_that_ends_no_login_is_accepted(name: str, url: str) -> None:
    load(name, url)


@pytest.mark.parametrize("url", ["localhost:6379", "[::1]:6379", "http://[::1]:6379", "redis+cluster://a"])
def test_the_error_of_a_redis_url_says_what_one_looks_like(url: str) -> None:
    with pytest.raises(SettingsError, match=r"expected redis://\[user\[:password\]@\]host:port/database, .*brackets"):
        load("redis.url", url)


@pytest.mark.parametrize("name", ["rollout.engine.endpoint", "tracing.endpoint"])
def test_no_error_of_another_url_without_its_scheme_shows_its_login(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting '{name}' .*not shown") as error:
        load(name, f"u:{SECRET}@host:1/v1")
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("name", ["rollout.engine.endpoint", "retriever.encoder.model", "tracing.endpoint"])
def test_a_web_address_without_a_host_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting '{name}' .*no host"):
        load(name, "http:///v1")


@pytest.mark.parametrize("name", ["retriever.encoder.model", "retriever.rerank.model"])
@pytest.mark.parametrize("url", ["ftp://host/x", "http://ho st"])
def test_an_endpoint_of_another_scheme_is_refused_when_settings_are_read(name: str, url: str) -> None:
    with pytest.raises(SettingsError, match=rf"'{name}' .*expected an address such as http://"):
        load(name, url)


@pytest.mark.parametrize("override", [f"redis.url: redis://:{SECRET}@host:1", f"redis.url redis://:{SECRET}@host:1"])
def test_what_is_no_override_is_named_up_to_its_value(override: str) -> None:
    with pytest.raises(SettingsError, match=r"'redis\.url[: ]' is not a setting: write key\.key=value") as error:
        load_settings(overrides=[override], environ={})
    assert SECRET not in str(error.value)


def test_an_error_of_yaml_names_the_place_and_does_not_quote_the_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f'run: {{id: a}}\nredis: {{url: "redis://:{SECRET}: x\n')
    with pytest.raises(SettingsError, match=r"settings.yaml is not YAML \(line 3, column 1\): ") as error:
        load_settings(file, environ={})
    assert SECRET not in str(error.value)
