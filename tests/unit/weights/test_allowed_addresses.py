"""Addresses of hostile messages: nothing outside of what the settings name is ever read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forage_weights.allowed_addresses import AddressError, AllowedAddresses

BUCKET = "s3://bucket/policies/run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs/run/policies/v1-e1").mkdir(parents=True)
    (tmp_path / "runs/run2").mkdir()
    return tmp_path / "runs/run"


@pytest.fixture
def allowed(run: Path) -> AllowedAddresses:
    return AllowedAddresses([run, BUCKET, "gs://other/", "simplecache::s3://cached/p", "https://host:8443/p"])


@pytest.mark.parametrize(
    "address",
    [
        f"{BUCKET}/v1-e1",
        f"{BUCKET}/v1-e1/",
        BUCKET,
        "gs://other/anything/v1",
        "simplecache::s3://cached/p/v1",
        "https://host:8443/p/v1",
    ],
)
def test_what_the_settings_name_is_allowed(address: str, allowed: AllowedAddresses) -> None:
    allowed.require(address)


def test_the_runs_folder_is_allowed_however_it_is_written(run: Path, allowed: AllowedAddresses) -> None:
    link = run.parent / "link"
    link.symlink_to(run)
    for address in (f"{run}", f"{run}/policies/v1-e1", f"{run}/policies/v9-e9/", f"file://{run}/x", f"{link}/policies"):
        allowed.require(address)
    AllowedAddresses([link]).require(f"{run}/policies")
    AllowedAddresses([os.path.relpath(run)]).require(f"{run}/policies")
    AllowedAddresses([f"file://{run}"]).require(f"{run}/policies")


HOSTILE = [
    "",
    "/",
    "//",
    "/etc/passwd",
    "etc/passwd",
    "~/.ssh",
    "../run",
    ".",
    "file:///etc",
    "file:/etc",
    "file://etc",
    "file:etc",
    "FILE:///etc",
    "local:///etc",
    "local:/etc",
    "http://169.254.169.254/latest/meta-data",
    "https://host:8443/q",
    "https://host/p/v1",
    "https://host:8443/p/v1?x=1",
    "https://host:8443/p/v1#x",
    "https://user@host:8443/p/v1",
    "https://host:8443@evil/p/v1",
    "https://host:8443/p@evil/v1",
    "https://host:8443/p/%2e%2e/x",
    "https://host:8443/p/..;/x",
    "https://host:8443\\@evil/p",
    "HTTPS://host:8443/p/v1",
    "http://host:8443/p/v1",
    "s3://bucket2/policies/run/v1",
    "s3://bucket/policies/run2/v1",
    "s3://bucket/policies/runs",
    "s3://bucket/policies",
    "s3://bucket/policies/run/../other",
    "s3://bucket/policies/run/./v1",
    "s3://bucket/policies/run//v1",
    "s3://bucket/policies/run/v1//",
    "s3://bucket/policies/run/%2e%2e/other",
    "s3://bucket/policies/run/..%2fother",
    "s3://bucket/policies/run/v1?versionId=x",
    "s3://bucket/policies/run/v1#x",
    "s3://key:secret@bucket/policies/run/v1",
    "s3://bucket@evil/policies/run/v1",
    "s3a://bucket/policies/run/v1",
    "S3://bucket/policies/run/v1",
    "s3:bucket/policies/run/v1",
    "s3:///bucket/policies/run/v1",
    "ѕ3://bucket/policies/run/v1",  # a Cyrillic letter
    "s3://bucket/policies/run/v\u2215..",  # a slash's look-alike
    "s3://bucket/policies/run/v1\u200b",
    "s3://bucket/policies/run/v1\n",
    "s3://bucket/policies/run/v1\0",
    "s3://bucket/policies/run/ v1",
    "s3://bucket\uff0fpolicies/run/v1",
    "s3://cached/p/v1",
    "simplecache::s3://cached/p/v1::x",
    "simplecache::http://evil/p",
    "filecache::s3://cached/p/v1",
    "simplecache::simplecache::s3://cached/p/v1",
    f"simplecache::{BUCKET}/v1",
    "simplecache::file:///etc",
    f"zip://x::{BUCKET}/v1",
    f"{BUCKET}/v1::http://evil",
    f"reference://::{BUCKET}",
    "memory://x",
    "data:text/plain,x",
    "ssh://host/x",
    "github://org:repo@/x",
    "\ud800",
    "\x1b]0;x\x07",
    "s3://bucket/policies/run/" + 3000 * "a",
]


@pytest.mark.parametrize("address", HOSTILE)
def test_hostile_addresses_are_refused(address: str, allowed: AllowedAddresses) -> None:
    with pytest.raises(AddressError) as refused:
        allowed.require(address)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 3000


@pytest.mark.parametrize(
    "form",
    [
        "{run}/..",
        "{run}/../run2",
        "{run}2",
        "{run}/policies/../../run2",
        "{run}/./policies",
        "{run}//policies",
        "/{run}",
        "file:{run}",
        "local://{run}",
        "simplecache::{run}/policies",
        "simplecache::file://{run}/policies",
        "{run}::http://evil",
        "{run}/policies\\..",
        "{run}/file:///",
        "{run}/policies//",
        "{run}/out",
        "{run}/policies/out/x",
        "{run}/up/run2",
    ],
)
def test_no_way_leads_out_of_the_runs_folder(form: str, run: Path, allowed: AllowedAddresses) -> None:
    (run / "out").symlink_to("/etc")
    (run / "policies/out").symlink_to("../../run2")
    (run / "up").symlink_to("..")
    with pytest.raises(AddressError):
        allowed.require(form.format(run=run))


def test_files_are_no_links_to_elsewhere_but_in_a_folder_that_the_settings_name(run: Path) -> None:
    folder = run / "policies/v1-e1"
    (run / "whole.safetensors").touch()
    (folder / "inside").symlink_to("../../whole.safetensors")
    (folder / "outside").symlink_to("/etc/passwd")
    AllowedAddresses([run]).require(str(folder), ["inside", "missing"])
    with pytest.raises(AddressError, match="'outside' is not allowed: it is a link to elsewhere"):
        AllowedAddresses([run]).require(str(folder), ["inside", "outside"])
    AllowedAddresses([run, folder]).require(str(run), ["whole.safetensors"])
    AllowedAddresses([folder]).require(str(folder), ["outside"])  # as a hub's cache has them


STRUCTURE = ["/", "//", "..", ".", "::", ":", "@", "%2e", "%2f", "~", "\\", "?", "#", "\0", "\n"]
WORDS = ["run", "run2", "etc", "file://", "file:", "local://", "s3://", "http://", "simplecache", "policies", "é", "٠"]
PIECES = st.sampled_from([*STRUCTURE, *WORDS])


def test_whatever_is_allowed_is_inside_for_fsspec_too(run: Path) -> None:
    allowed = AllowedAddresses([run, BUCKET])
    starts = st.sampled_from(["", str(run), f"{run}/", f"file://{run}/", BUCKET, f"{BUCKET}/", f"simplecache::{run}/"])

    @settings(max_examples=100, deadline=None)
    @example(str(run), ["/", "file://", "/"])
    @given(starts, st.lists(PIECES | st.text(max_size=4), max_size=6))
    def check(start: str, pieces: list[str]) -> None:
        address = start + "".join(pieces)
        try:
            allowed.require(address)
        except AddressError:
            return
        if address.startswith("s3://"):
            # s3fs itself is not in every environment, and takes what follows the scheme as bucket and key.
            bucket, _, key = address.removeprefix("s3://").partition("/")
            assert bucket == "bucket"
            assert (key.rstrip("/") + "/").startswith("policies/run/")
            assert not {"..", ".", ""} & set(key.rstrip("/").split("/"))
            return
        system, path = url_to_fs(address)
        assert type(system) is LocalFileSystem
        assert Path(os.path.realpath(path)).is_relative_to(run)

    check()
