"""Whether the retriever answers as fast as a run searches: in every recipe and values file, and in their variations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from forage_cli.local import gpus
from forage_cli.main import app
from forage_cli.planning.assumptions import Assumptions
from forage_cli.planning.changes import apply_changes
from forage_cli.planning.gpus import KINDS
from forage_cli.planning.plan import Plan, PlanRequest, make_plan
from forage_cli.planning.remedies import find_remedies
from forage_cli.planning.retrieval import here as searches
from forage_cli.planning.retrieval.capacity import Machine, Retrieval, count_searching, estimate_retrieval
from forage_cli.planning.retrieval.corpus import Corpus
from forage_cli.planning.retrieval.cost import UnknownCostError, estimate_cost, list_measured
from forage_cli.planning.shapes import read_shape
from forage_cli.planning.split import apply_split, divide
from forage_runtime.errors import UserError
from forage_runtime.settings import RetrieverSettings, Settings, check_settings, load_settings

REPOSITORY = Path(__file__).parents[3]
WIKIPEDIA = 21_015_324
SEARCHED = sorted((REPOSITORY / "configs").glob("*nq_hotpotqa*.yaml"))
CHARTS = sorted((REPOSITORY / "deploy/helm/forage").glob("values-gpu-*.yaml"))
H100 = KINDS["H100"]


def plan_recipe(file: Path, **changes: object) -> Plan:
    settings = load_settings(file, [f"{name.replace('__', '.')}={value}" for name, value in changes.items()], {})
    return make_plan(apply_split(settings, divide(settings, 8)), PlanRequest(read_shape(settings.model.path), H100))


def get_retrieval(plan: Plan) -> Retrieval:
    assert plan.retrieval is not None
    return plan.retrieval


def estimate(settings: Settings, cpus: int = 4, **known: Any) -> Retrieval:
    found = estimate_retrieval(settings, Machine(cpus), Assumptions(), **known)
    assert found is not None
    return found


@pytest.mark.parametrize("recipe", SEARCHED, ids=[recipe.stem for recipe in SEARCHED])
def test_the_index_of_a_recipe_answers_twice_what_the_run_asks(recipe: Path) -> None:
    assert len(SEARCHED) == 5
    retrieval = get_retrieval(plan_recipe(recipe))
    assert retrieval.passages == WIKIPEDIA
    assert retrieval.given_over_needed is not None
    assert retrieval.given_over_needed >= 2


@pytest.mark.parametrize("values", CHARTS, ids=[file.stem for file in CHARTS])
def test_the_retriever_of_a_chart_answers_twice_what_the_run_asks_and_holds_its_index(values: Path) -> None:
    content = yaml.safe_load(values.read_text())
    trainer, retriever = content["trainer"], content["retriever"]
    changes = {"trainer.n_gpus_per_node": trainer["gpu"]["count"], "trainer.nnodes": trainer.get("nodes", 1)}
    settings = apply_changes(check_settings(content["settings"]), changes | {"trainer.ray.address": "auto"})
    cpus, memory = (retriever["resources"]["requests"][name] for name in ("cpu", "memory"))
    machine = Machine(int(cpus), retriever.get("replicas", 1))
    made = make_plan(settings, PlanRequest(read_shape(settings.model.path), H100, retriever=machine))
    retrieval = get_retrieval(made)
    assert retrieval.threads == int(cpus) == int(retriever["resources"]["limits"]["cpu"])
    assert retrieval.given_over_needed is not None
    assert retrieval.given_over_needed >= 2
    index = next(part.size for part in made.hosts if part.name == "retriever")
    assert index < 0.8 * int(memory.removesuffix("Gi")) * 2**30
    scaling = retriever.get("autoscaling", {})
    if scaling.get("enabled"):
        busy = (1 + (int(cpus) - 1) * Assumptions().thread_use) / int(cpus)
        assert scaling["targetCPUUtilization"] / 100 < 0.8 * busy, "a saturated pod must reach the target"
        assert scaling["minReplicas"] == machine.replicas


def test_an_exact_index_of_wikipedia_is_refused_with_settings_that_do() -> None:
    recipe = REPOSITORY / "configs/search_r1_nq_hotpotqa_grpo_7b.yaml"
    made = plan_recipe(recipe, retriever__faiss_factory="Flat", retriever__threads=1)
    assert not made.fits
    (problem,) = made.problems
    assert problem.startswith("the retriever answers ")
    assert float(problem.split()[3]) < 10
    assert "queries/s (Flat over 21,015,324 passages, 1 thread(s) on 32 CPUs)" in problem
    assert "a search of the 2560 trajectories in flight takes" in problem
    settings = apply_changes(
        load_settings(recipe, environ={}),
        {"retriever.faiss_factory": "Flat", "retriever.threads": 1, "trainer.n_gpus_per_node": 4},
    )
    remedies = find_remedies(settings, made.request)
    assert remedies
    for remedy in remedies:
        assert remedy.plan.fits
        assert set(remedy.changes) & {"retriever.threads", "retriever.faiss_factory"}
        assert make_plan(apply_changes(settings, remedy.changes), replace(made.request, passages=WIKIPEDIA)).fits


def test_the_command_shows_what_is_needed_and_given() -> None:
    options = ["plan", "-c", str(SEARCHED[2]), "--gpu", "H100", "--gpus", "8", "--retriever-cpus", "48"]
    text = CliRunner().invoke(app, options).output
    for words in ("searches: IVF16384,SQ8 over 21,015,324 passages; 1 × 48 CPUs, 32 thread(s)", "given / needed"):
        assert words in text
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)["retrieval"]
    assert found["given_over_needed"] == pytest.approx(found["given_qps"] / found["needed_qps"], rel=0.01)
    assert found["needed_qps"] == max(found["mean_qps"], found["peak_qps"])
    twice = [*options, "--retriever-replicas", "2", "--json"]
    assert json.loads(CliRunner().invoke(app, twice).output)["retrieval"]["given_qps"] == pytest.approx(
        2 * found["given_qps"], rel=0.01
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"retriever.faiss_factory": "IVF64,PQ7x3"}, "not measured: an index of type IVF64,PQ7x3"),
        ({"retriever.encoder.model": "bge-large-en"}, "not measured: an encoder of 24 layers of width 1024 in int8"),
        ({"retriever.rerank.model": "reranker"}, "not measured: reranking"),
        ({"retriever.device": "gpu"}, "not measured: a retriever on GPUs"),
        ({"local.gpus.retriever": [7]}, "not measured: a retriever on GPUs"),
        ({"retriever.mode": "bm25"}, "not measured: BM25 over more than 1,519,000 passages"),
    ],
)
def test_what_was_not_measured_has_no_number_and_is_no_problem(changes: dict[str, object], words: str) -> None:
    settings = apply_changes(Settings(), {"retriever.mode": "dense", "retriever.encoder.precision": "int8", **changes})
    found = estimate(settings, passages=WIKIPEDIA)
    assert found.given is None
    assert found.fits
    assert words in found.why


def test_passages_that_nobody_knows_are_asked_for(tmp_path: Path) -> None:
    settings = apply_changes(Settings(), {"data.corpus": tmp_path / "none.jsonl"})
    assert estimate(settings).why == "not checked: the number of passages is not known (--passages)"
    assert estimate(settings, passages=10).given is not None


def test_type_and_passages_are_those_of_the_index_that_is_here(tmp_path: Path) -> None:
    content = {"passages": 1000, "dense": {"factory": "IVF16,SQ8"}, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps({"sha256": "0", "manifest": content}))
    settings = apply_changes(Settings(), {"retriever.index": tmp_path, "retriever.mode": "dense"})
    assert estimate(settings).why == "IVF16,SQ8 over 1,000 passages"
    (tmp_path / "manifest.json").write_text(json.dumps({"manifest": {"passages": 1, "dense": {}}}))
    with pytest.raises(UserError, match=r"manifest.json is not that of an index"):
        estimate(settings)


def test_a_corpus_that_is_here_is_counted_and_shards_divide_it(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1"}\n\n{"id": "2"}\n')
    settings = apply_changes(Settings(), {"data.corpus": tmp_path / "corpus.jsonl"})
    assert estimate(settings).passages == 2
    whole = apply_changes(Settings(), {"retriever.mode": "dense"})
    cut = apply_changes(whole, {"retriever.shards": ["127.0.0.1:1", "127.0.0.1:2"]})
    given = [estimate(one, passages=WIKIPEDIA).given for one in (whole, cut)]
    assert given[0] is not None
    assert given[1] is not None
    assert 1.9 < given[1] / given[0] <= 2


def test_an_adopted_file_is_the_type_of_its_class_and_an_endpoint_encodes_elsewhere() -> None:
    retriever = RetrieverSettings.model_validate({"mode": "dense", "encoder": {"precision": "int8"}})
    adopted, exact = (estimate_cost(retriever, Corpus(10**6, name)) for name in ("IndexFlatIP", "Flat"))
    assert adopted == exact
    remote = retriever.model_copy(update={"encoder": retriever.encoder.model_copy(update={"model": "http://tei"})})
    assert estimate_cost(remote, Corpus(10**6, "Flat")).encoding == 0 < exact.encoding
    with pytest.raises(UnknownCostError):
        estimate_cost(retriever, Corpus(None, "Flat"))


def test_a_query_costs_more_alone_with_more_effort_and_among_more_passages() -> None:
    def cost(factory: str, passages: int = 10**6, load: Any = "batch", **changes: object) -> float:
        retriever = RetrieverSettings.model_validate(
            {"mode": "dense", "encoder": {"model": "e5-base", "precision": "fp32"}, **changes}
        )
        return estimate_cost(retriever, Corpus(passages, factory), load).search

    for factory, more in (("HNSW32_SQ8", {"ef_search": 512}), ("IVF4096,SQ8", {"nprobe": 512})):
        assert cost(factory) < cost(factory, **more)
        assert cost(factory) < cost(factory, 10**8)
        assert cost(factory) < cost(factory, load="single")
    assert cost("IVF4096,SQ8", nprobe=4096) == cost("IVF4096,SQ8", nprobe=10**6), "there are no more cells"
    assert cost("Flat", 2 * 10**6) == pytest.approx(2 * cost("Flat"), rel=0.02)  # but for what every search costs


def test_what_searches_at_once_is_limited_by_engines_groups_and_prompts() -> None:
    base: dict[str, object] = {"data.train_batch_size": 512, "rollout.n": 5, "trainer.max_staleness": 0}
    base |= {"rollout.max_groups_in_flight": 512}
    assert count_searching(apply_changes(Settings(), base | {"rollout.max_trajectories_in_flight": 10_000})) == 2560
    assert count_searching(apply_changes(Settings(), base | {"rollout.max_trajectories_in_flight": 7})) == 7
    groups = base | {"rollout.max_groups_in_flight": 8, "rollout.max_trajectories_in_flight": 10_000}
    assert count_searching(apply_changes(Settings(), groups)) == 40
    engines = base | {"rollout.engine.max_num_seqs": 16, "rollout.engine_replicas": {"min": 1, "max": 2}}
    assert count_searching(apply_changes(Settings(), engines)) == 128


def test_a_run_that_searches_nothing_is_not_checked() -> None:
    routes = {"countdown": {"name": "single_turn"}}
    changes = {"rollout.environments": routes, "reward.routes": {"countdown": {"name": "em"}}}
    assert estimate_retrieval(apply_changes(Settings(), changes), Machine(1), Assumptions()) is None
    assert estimate_retrieval(apply_changes(Settings(), {"rollout.max_turns": 0}), Machine(1), Assumptions()) is None


def test_types_that_a_plan_proposes_find_what_exact_search_finds() -> None:
    types = [str(one["retriever.faiss_factory"]) for one in list_measured(WIKIPEDIA)]
    assert types[0] == "Flat"
    assert len(types) > 1


def test_a_check_of_the_settings_says_what_this_machine_answers_and_warns_where_it_is_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU there is no plan: the retriever alone is checked."""
    monkeypatch.setattr(searches, "count_cpus", lambda: 2)
    settings = load_settings(SEARCHED[2], ["retriever.faiss_factory=Flat", "retriever.threads=0"], {})
    found = searches.estimate_searches(settings)
    assert found is not None
    assert (found.threads, found.mean) == (2, 0)
    line = searches.describe_searches(found)
    assert line.startswith("2560 at once within 30 s; Flat over 21,015,324 passages answers about ")
    assert "with 2 thread(s) on 2 CPUs" in line
    (problem,) = [one for one in gpus.find_plan_problems(settings) if "the retriever answers" in one]
    assert "the run needs 85" in problem
    demo = load_settings(REPOSITORY / "configs/demo.yaml", [f"data.corpus={tmp_path / 'corpus.jsonl'}"], {})
    (tmp_path / "corpus.jsonl").write_text('{"id": "1"}\n')
    assert gpus.find_plan_problems(demo) == []
    elsewhere = load_settings(SEARCHED[2], ["retriever.http_address=retriever:18610"], {})
    assert searches.find_machine(elsewhere).cpus == 32
    unknown = searches.estimate_searches(load_settings(SEARCHED[2], ["retriever.faiss_factory=PQ8"], {}))
    assert unknown is not None
    assert searches.describe_searches(unknown).endswith("not measured: an index of type PQ8")
