"""In an object store vectors are those of a disk, whatever the store refuses, loses or hears twice."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from onnxtool.cli.entry import main
from onnxtool.encoding import (
    CorpusOptions,
    PartOptions,
    VectorOptions,
    corpus_status,
    encode_corpus,
    encode_part,
    files,
    merge,
    merge_parts,
    run,
)
from onnxtool.encoding.files import entries, scratch_folder
from onnxtool.encoding.locations import Uri, parse_location
from onnxtool.encoding.output import OutputFolder
from onnxtool.encoding.reading import read_shards
from onnxtool.encoding.records import Records, Run
from onnxtool.encoding.report import MergeReport
from onnxtool.encoding.run import plan_corpus
from onnxtool.encoding.sources import SourceReader, find_sources
from onnxtool.errors import InputError, OnnxtoolError, OutputExistsError, OutputWriteError, StoreError
from tests.encoding import corpora
from tests.encoding.corpora import (
    collection,
    dense_model,
    kill_two,
    make_texts,
    part_command,
    sparse_model,
    write_corpus,
)
from tests.encoding.store_server import (
    BUCKET,
    SECRET,
    STORES,
    Azure,
    Store,
    StoreKind,
    store_server,
)
from tests.packages import need

pytestmark = pytest.mark.usefixtures("workers_here")

# Of fewer shards than on a disk, as each takes some requests.
SIZES: dict[str, Any] = {"provider": "cpu", "shard_size": 40, "split_bytes": 20_000}
OPTIONS, WHOLE = VectorOptions(**SIZES), CorpusOptions(**SIZES)


def whole(folder: Path, model: Path, corpus: Path, **options: Any) -> dict[str, bytes]:
    """Encode on the disk in one run, and return what that wrote."""
    return corpora.whole(folder, model, corpus, **{**SIZES, **options})


each_store = pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.scheme, indirect=True)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[StoreKind], Store]]:
    """Servers that are begun when a test wants them, one of each kind for all tests of this file."""
    with ExitStack() as stack:
        yield lru_cache(lambda kind: stack.enter_context(store_server(kind)))


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> StoreKind:
    """S3, where a test does not ask for each kind."""
    found: StoreKind = getattr(request, "param", STORES[0])
    if missing := found.missing():
        pytest.skip(f"needs {missing}")
    return found


@pytest.fixture
def store(servers: Callable[[StoreKind], Store], kind: StoreKind, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket."""
    found = servers(kind)
    for name, value in kind.environment(found.address).items():
        monkeypatch.setenv(name, value)
    yield found
    files._client.cache_clear()
    found.clear()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a client try again at once: a server of this machine needs no rest."""
    client = need("obstore.store")
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=10), "base": 2}
    make = client.from_url

    def make_impatient(root: str, *, retry_config: dict[str, Any], **options: Any) -> Any:
        return make(root, retry_config={**retry_config, "backoff": backoff}, **options)

    monkeypatch.setattr(client, "from_url", make_impatient)
    monkeypatch.setattr(files, "_WAITS", [0.05 * wait for wait in files._WAITS])


@pytest.mark.parametrize(
    ("kind", "corpus_kind"),
    [(STORES[0], "parquet"), *((kind, "folder") for kind in STORES)],
    ids=lambda value: getattr(value, "scheme", value),
    indirect=["kind"],
)
def test_vectors_of_a_store_are_those_of_a_disk(store: Store, tmp_path: Path, corpus_kind: str) -> None:
    """Of parts and of one run; the names have digests there, and nothing else differs."""
    model, corpus = dense_model(tmp_path), collection(tmp_path, corpus_kind, 60)
    expected = whole(tmp_path, model, corpus)
    uris = store.model(model), store.put(f"in/{corpus.name}", corpus)
    output = f"{store.uri}/out/parts/"
    for part in ("3/3", "1/3"):
        encode_part(*uris, output, OPTIONS, PartOptions(part=part))
    assert not corpus_status(output).merged
    assert merge_parts(output).to_do == corpus_status(output).to_do
    encode_part(*uris, output, OPTIONS, PartOptions(part="2/3"))
    assert merge_parts(output, read_back=True).manifest
    assert (corpus_status(output).merged, encode_part(*uris, output, OPTIONS).num_encoded) == (True, 0)
    encode_corpus(*uris, f"{store.uri}/out/run", WHOLE)
    assert store.outcome("out/parts") == store.outcome("out/run") == expected


@pytest.mark.parametrize(("sparse", "options"), [(True, {}), (True, {"output_format": "parquet"})])
def test_every_format_goes_to_a_store(store: Store, tmp_path: Path, sparse: bool, options: dict[str, Any]) -> None:
    """Ids that occur twice are dropped there as well, and all is read back from there."""
    model = sparse_model(tmp_path) if sparse else dense_model(tmp_path)
    corpus = write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    corpus.write_text(corpus.read_text().replace('"d80"', '"d8"'))
    encode_corpus(model, corpus, f"{store.uri}/vectors", replace(WHOLE, **options))
    assert store.outcome("vectors") == whole(tmp_path, model, corpus, **options)
    if options.get("output_format") == "parquet":
        there, here = list(read_shards(f"{store.uri}/vectors")), list(read_shards(tmp_path / "whole"))
        assert [shard.ids for shard in there] == [shard.ids for shard in here]


@pytest.mark.parametrize("kind", STORES[-1:], ids=["az"], indirect=True)
def test_a_container_of_azure_has_two_addresses(store: Store, tmp_path: Path) -> None:
    """Its own, and that of Data Lake Storage, which names the account as well."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    uri = store.put("corpus.jsonl", corpus)
    uris = store.model(model), uri
    encode_part(*uris, f"{Azure.data_lake_uri}/vectors/", OPTIONS, PartOptions(splits="0"))
    encode_part(*uris, f"{store.uri}/vectors", OPTIONS)
    assert merge_parts(f"{store.uri}/vectors").manifest
    assert corpus_status(f"{Azure.data_lake_uri}/vectors").merged
    assert store.outcome("vectors") == whole(tmp_path, model, corpus)


def test_names_in_a_store_may_have_what_addresses_may_not(store: Store, tmp_path: Path) -> None:
    """A question mark, a fragment or an escape. What no key may have is an error."""
    for place, name in enumerate(("what?.jsonl", "a#1.jsonl", "100%20.jsonl")):
        store.write(f"in/{name}", json.dumps({"id": f"{place}", "contents": "a cat"}).encode())
    model = store.model(dense_model(tmp_path))
    report = encode_corpus(model, f"{store.uri}/in", f"{store.uri}/vectors", WHOLE)
    assert (report.num_texts, report.rejects) == (3, {})
    with pytest.raises(StoreError, match="llegal"):
        find_sources(parse_location(f"{store.uri}/in/\x01.jsonl"))


def test_a_process_leaves_no_copy_of_a_model(store: Store, tmp_path: Path) -> None:
    """Where it has done its work; models are large."""
    model, corpus = store.model(dense_model(tmp_path)), write_corpus(tmp_path / "corpus.jsonl", make_texts(9))
    (tmp_path / "temporary").mkdir()
    variables = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    command = part_command(tmp_path, OPTIONS, model, corpus, tmp_path / "vectors")
    subprocess.run(command, env=variables, check=True)
    assert corpus_status(tmp_path / "vectors").num_done == 1
    assert not list((tmp_path / "temporary").glob("onnxtool-*"))


@pytest.mark.parametrize(
    ("kind", "seed"),
    [*((STORES[0], seed) for seed in range(2)), *((kind, 3) for kind in STORES[1:])],
    indirect=["kind"],
)
@pytest.mark.usefixtures("short_waits")
def test_nothing_is_lost_where_the_store_fails(store: Store, tmp_path: Path, seed: int) -> None:
    """Requests are refused, some are done and not answered, and some answers break off."""
    model, corpus = dense_model(tmp_path), collection(tmp_path, "folder", 60)
    expected = whole(tmp_path, model, corpus)
    uris = store.model(model), store.put("corpus", corpus)
    store.faults.error, store.faults.after, store.faults.dropped = 0.06, 0.04, 0.03
    store.faults.chance = random.Random(seed)  # noqa: S311  no secret
    for part in ("2/2", "1/2"):
        encode_part(*uris, f"{store.uri}/vectors/", OPTIONS, PartOptions(part=part))
    assert merge_parts(f"{store.uri}/vectors/").manifest
    store.faults.end()
    assert store.outcome("vectors") == expected


@each_store
def test_a_record_is_written_after_its_shard_and_the_manifest_last(store: Store, tmp_path: Path) -> None:
    """In the order of the requests that the server saw; and no upload of several requests is begun."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    uris = store.model(model), store.put("corpus.jsonl", corpus)
    store.faults.seen.clear()
    encode_part(*uris, f"{store.uri}/vectors/", OPTIONS)
    merge_parts(f"{store.uri}/vectors/")
    seen = store.faults.seen
    written = [request.path.rpartition("/")[2] for request in seen if request.method == "PUT"]
    for name in ("part-00000", "part-00000_00001", "part-00000_00002"):
        places = [place for place, found in enumerate(written) if found.startswith(f"{name}.")]
        assert [written[place].rpartition(".")[2] for place in places] == ["npy", "jsonl", "json"]
    splits = [place for place, name in enumerate(written) if name.startswith("split-")]
    assert all(written[place - 1].startswith("part-") for place in splits)
    assert written[-1] == "vectors.manifest.json"
    # Removing many is asked of the bucket; an upload of several requests would begin with one of an object, or put
    # blocks of it.
    assert {request.path for request in seen if request.method == "POST"} <= {f"/{BUCKET}", f"/testing/{BUCKET}"}
    assert not [request for request in seen if request.method == "PUT" and request.query]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_parts_that_are_killed_leave_nothing_half(store: Store, tmp_path: Path) -> None:
    """At random moments, two of the same shards at once, while the store fails now and then."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(240))
    expected = whole(tmp_path, model, corpus)
    places = store.model(model), store.put("corpus.jsonl", corpus), f"{store.uri}/vectors/"
    store.faults.error = 0.05
    command, chance = part_command(tmp_path, OPTIONS, *places), random.Random(1)  # noqa: S311  no secret
    kill_two(command, chance, lambda: any("vectors.parts/part-" in name for name in store.names()))
    encode_part(*places, OPTIONS)
    assert merge_parts(places[2], read_back=True).manifest
    store.faults.error = 0.0
    assert store.outcome("vectors") == expected


@each_store
def test_parts_of_two_versions_of_a_file_are_not_merged(store: Store, tmp_path: Path) -> None:
    """Of the same size: a store tells them apart."""
    model, texts = dense_model(tmp_path), make_texts(120)
    options = replace(OPTIONS, split_bytes=2000)
    for number, written in enumerate((texts, texts[::-1]), start=1):
        place = store.put("corpus.jsonl", write_corpus(tmp_path / "corpus.jsonl", written))
        encode_part(model, place, f"{store.uri}/vectors", options, PartOptions(part=f"{number}/2"))
    with pytest.raises(InputError, match="splits 1 and 2 were read from different versions of a file"):
        merge_parts(f"{store.uri}/vectors")


def test_a_record_that_the_same_command_elsewhere_dropped_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as a race can need it; after that, the folder has changed."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(5))
    times = 1

    def publish(folder: OutputFolder, found: Run | None, **options: bool) -> MergeReport:
        nonlocal times
        times -= 1
        if times >= 0 and found is not None:
            Records(folder, found).forget(0, [])
        return merge.publish(folder, found, **options)

    monkeypatch.setattr(run, "publish", publish)
    assert encode_corpus(model, corpus, tmp_path / "vectors", WHOLE).num_texts == 5
    times = 3
    with pytest.raises(InputError, match="have changed: splits 0"):
        encode_corpus(model, corpus, tmp_path / "others", WHOLE)


@each_store
def test_two_commands_cannot_have_one_folder(store: Store, tmp_path: Path) -> None:
    """Who creates its file first has it; the same command twice at once is one."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    failures: list[BaseException] = []

    def encode() -> None:
        try:
            encode_corpus(model, corpus, f"{store.uri}/vectors", WHOLE)
        except OnnxtoolError as error:
            failures.append(error)

    threads = [threading.Thread(target=encode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.outcome("vectors") == whole(tmp_path, model, corpus)
    with pytest.raises(OutputExistsError, match="written by another command"):
        encode_corpus(model, corpus, f"{store.uri}/vectors", CorpusOptions(provider="cpu", shard_size=7))
    with pytest.raises(OutputExistsError, match="written by another command"):
        encode_part(model, corpus, f"{store.uri}/vectors", replace(OPTIONS, shard_size=7))
    encode_corpus(model, corpus, f"{store.uri}/vectors", CorpusOptions(provider="cpu", shard_size=80, force=True))
    assert len([name for name in store.outcome("vectors") if name.endswith(".npy")]) == 2


@each_store
@pytest.mark.usefixtures("short_waits")
def test_what_is_created_once_is_not_replaced(store: Store) -> None:
    """By the request itself, whose answer may be lost: then the contents tell."""
    place = parse_location(f"{store.uri}/x/manifest.json")
    folder = OutputFolder(f"{store.uri}/x")
    assert folder.create(place, b"first")
    assert not folder.create(place, b"second")
    assert folder.create(place, b"first")
    store.faults.lost = 3
    assert folder.create(parse_location(f"{store.uri}/x/other.json"), b"content")
    assert store.objects("x") == {"x/manifest.json": b"first", "x/other.json": b"content"}


@each_store
def test_files_of_somebody_are_left_alone(store: Store, tmp_path: Path) -> None:
    """As on a disk."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(5))
    store.write("vectors/notes.txt", b"mine")
    store.write("vectors/sub/notes.txt", b"mine")
    for call in (encode_corpus, encode_part):
        with pytest.raises(OutputExistsError, match=r"notes\.txt"):
            call(model, corpus, f"{store.uri}/vectors")
    assert store.objects("vectors/").keys() == {"vectors/notes.txt", "vectors/sub/notes.txt"}


@each_store
def test_a_file_is_read_by_requests_of_its_own(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which begin where a shard begins; one that has changed meanwhile is an error."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", make_texts(2000))
    monkeypatch.setattr(files, "RANGE_BYTES", 1 << 14)
    uri = store.put("corpus.jsonl", corpus)
    here, there = (SourceReader(find_sources(parse_location(place))[0]) for place in (corpus, uri))
    assert list(here) == list(there)
    reader = iter(SourceReader(find_sources(parse_location(uri))[0]))
    next(reader)
    store.put("corpus.jsonl", write_corpus(tmp_path / "corpus.jsonl", make_texts(2000, seed=1)))
    with pytest.raises(StoreError, match=r"corpus\.jsonl"):
        list(reader)


def test_a_model_in_a_folder_for_other_tools_is_fetched_with_what_lies_above(store: Store, tmp_path: Path) -> None:
    """`onnx/model.onnx` has its checkpoint in the folder above; weights of other formats are not fetched."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(9))
    store.put("kept", model.with_suffix(""))
    store.write("kept/pytorch_model.bin", b"weights")
    uri = store.put("kept/onnx/model.onnx", model)
    encode_corpus(uri, corpus, f"{store.uri}/vectors", WHOLE)
    assert store.outcome("vectors") == whole(tmp_path, model, corpus)
    assert not [path for method, path, _ in store.faults.seen if method == "GET" and path.endswith("pytorch_model.bin")]


@pytest.mark.parametrize(
    "address",
    [
        f"s3://KEY:{SECRET}@bucket/vectors",
        f"s3://{SECRET}@bucket/vectors",
        f"https://user:{SECRET}@example.org/corpus.jsonl",
        f"https://example.org/corpus.jsonl?X-Amz-Signature={SECRET}",
        f"az://container/vectors?sig={SECRET}",
        f"abfss://container:{SECRET}@account.dfs.core.windows.net/vectors",
        f"gs://bucket/vectors#{SECRET}",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_shown(address: str) -> None:
    """Manifests and logs would show them."""
    with pytest.raises(InputError, match="credentials") as refused:
        parse_location(address)
    assert SECRET not in str(refused.value)


@each_store
def test_no_credentials_are_written_or_shown(store: Store, tmp_path: Path) -> None:
    """Of the environment, in whatever is written, or said of a failure."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(9))
    output = f"{store.uri}/vectors/"
    encode_part(store.model(model), store.put("corpus.jsonl", corpus), output, OPTIONS)
    merge_parts(output)
    store.faults.error = 1.0
    files._client.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_RETRIES", 1)
        patch.setattr(files, "_WAITS", ())
        with pytest.raises(StoreError) as failed:
            corpus_status(output)
    files._client.cache_clear()
    store.faults.error = 0.0
    said = str(failed.value).encode()
    assert not [key for key, content in {**store.objects(), "said": said}.items() if SECRET.encode() in content]


@pytest.mark.parametrize("scheme", ["nonsense", "hdfs", "sftp", "zip", "local"])
def test_other_addresses_are_refused_by_name(scheme: str) -> None:
    """And what is read instead is said."""
    with pytest.raises(InputError, match=rf"no store of the kind {scheme}://"):
        parse_location(f"{scheme}://place/file.jsonl")


@pytest.mark.parametrize("address", ["s3://", "s3:///key", "s3://b//x", "s3://b/../x", "s3://b/a/./x", "file://host/x"])
def test_addresses_of_nothing_are_refused(address: str) -> None:
    """A key that could be read in two ways among them."""
    with pytest.raises(InputError):
        parse_location(address)


def test_an_address_of_a_file_is_its_path() -> None:
    """Escapes are read."""
    assert parse_location("file:///a/b%20c") == Path("/a/b c")


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def test_commands_take_addresses(store: Store, tmp_path: Path) -> None:
    """Those of a corpus; others say that they do not."""
    model = dense_model(tmp_path)
    corpus = store.put("corpus.jsonl", write_corpus(tmp_path / "corpus.jsonl", make_texts(90)))
    uri = store.model(model)
    common = ("--quiet", "--format", "json")
    code, shown = _run("infer", "--model_path", uri, "--input", corpus, "--output", f"{store.uri}/run/", *common)
    assert (code, json.loads(shown)["num_texts"]) == (0, 90)
    output = f"{store.uri}/vectors/"
    assert _run("encode", "part", "--model_path", uri, "--input", corpus, "--output", output, *common)[0] == 0
    for command in ("merge", "status"):
        assert _run("encode", command, "--output", output, *common)[0] == 0
    for arguments in (
        ("stats", uri),
        ("infer", "--model_path", uri, "--text", "a cat"),
        ("infer", "--model_path", str(model), "--input", corpus),
        ("optimize", "--model_path", uri, "--output", f"{store.uri}/x.onnx"),
        ("encode", "status", "--output", f"s3://KEY:{SECRET}@bucket/x"),
    ):
        code, shown = _run(*arguments)
        assert (code, SECRET in shown, "store" in shown or "credentials" in shown) == (2, False, True), shown


def test_mistakes_are_one_error_each(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket, a model or a corpus that is not there, a server that is only read, and a package that is missing."""
    model = dense_model(tmp_path)
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    options = CorpusOptions(provider="cpu")
    with pytest.raises(InputError, match="no such input file"):
        encode_corpus(model, f"{store.uri}/none.jsonl", tmp_path / "v", options)
    with pytest.raises(InputError, match="no such model"):
        encode_corpus(f"{store.uri}/none.onnx", corpus, tmp_path / "v", options)
    with pytest.raises(InputError, match="the whole of a store"):
        encode_corpus(model, corpus, f"{store.uri}/", options)
    with pytest.raises(StoreError, match="NoSuchBucket"):
        encode_corpus(model, corpus, "s3://no-such-bucket/vectors", options)
    with pytest.raises((InputError, OutputWriteError), match="is only read from"):
        encode_corpus(model, corpus, f"{store.address}/vectors", options)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    files._client.cache_clear()
    with pytest.raises(InputError, match=r"needs obstore.*\n.*onnxtool-cli\[stores\]"):
        corpus_status(f"{store.uri}/x")
    files._client.cache_clear()


def test_a_listing_that_is_long_is_whole(store: Store) -> None:
    """It is asked for a thousand names at a time."""
    names = {f"part-{number:05d}.json" for number in range(1001)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: store.write(f"v.parts/{name}", b"{}"), names))
    store.faults.seen.clear()
    assert set(entries(parse_location(f"{store.uri}/v.parts"))) == names
    assert len(store.faults.seen) < 5


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is old and has no lock; one that is in use stays, and so does that of somebody else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, young, other = (tmp_path / name for name in ("onnxtool-model-old", "onnxtool-model-young", "notes"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "x").write_text("")
    for folder in (old, other):
        os.utime(folder, (0, 0))
    with scratch_folder("model") as used:
        os.utime(used, (0, 0))
        with scratch_folder("model"):
            assert (old.exists(), young.exists(), other.exists(), used.exists()) == (False, True, True, True)
    assert not used.exists()


@each_store
def test_a_range_is_what_a_file_has(store: Store) -> None:
    """Of a file object as other libraries use it."""
    content = bytes(range(256)) * 20
    store.write("x", content)
    file = io.BufferedReader(files.RangeReader(Uri(store.uri, "x")), 100)
    assert (file.read(10), file.seek(-5, os.SEEK_END), file.read()) == (content[:10], len(content) - 5, content[-5:])
    assert (file.seek(99), file.read(250), file.tell()) == (99, content[99:349], 349)
    assert (file.seek(len(content) + 7), file.read(3)) == (len(content) + 7, b"")


def test_a_test_collection_in_a_store_means_its_documents(store: Store) -> None:
    """A file of them, or a folder, which the listing of the files above it does not have."""
    store.write("a/queries.jsonl", b'{"_id": "q", "text": "a dog"}')
    store.write("a/corpus/part.jsonl", b'{"_id": "d", "text": "a cat"}')
    store.write("b/topics.txt", b"q\ta dog")
    store.write("b/collection.tsv", b"d\ta cat")
    for name, left_out in (("a", "queries.jsonl"), ("b", "topics.txt")):
        sources, others = find_sources(parse_location(f"{store.uri}/{name}"))
        assert [line.id for line in SourceReader(sources)] == ["d"]
        assert others == (left_out,)


def test_a_shard_that_no_store_takes_is_the_error_of_the_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one of its files, which are closed by then, and removed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreError("the store is gone", "check the network")

    monkeypatch.setattr("onnxtool.encoding.output.put", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(9))
    with pytest.raises(StoreError, match="the store is gone"):
        encode_corpus(model, corpus, f"{store.uri}/vectors", CorpusOptions(provider="cpu"))
    assert not list(tmp_path.glob("onnxtool-*"))


def test_what_no_vectors_are_written_to_is_refused(tmp_path: Path) -> None:
    """A server, in one run, in parts and as a plan."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(9))
    calls: tuple[Callable[..., object], ...] = (encode_corpus, encode_part, plan_corpus)
    for call in calls:
        with pytest.raises(OutputWriteError, match=r"out is only read from\n.*s3://"):
            call(model, corpus, "https://example.org/out", WHOLE)
