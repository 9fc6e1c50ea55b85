"""Values of ``key=value``: those that a shell hands over, and Hydra's functions."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from moh.arguments import parse_arguments
from moh.cli import compose_config, compose_jobs, experiments
from moh.jobs import expand_jobs

MHA = "experiment=demo/vit/mha"

PATHS = [
    "/tmp/e=3/x.npz",
    "/tmp/a b/x",
    "/tmp/x(1).npz",
    "copy(1)",
    "/tmp/#a",
    "~/x",
    "/tmp/é/日本",
    "it's",
    'a "b" c',
    "a\\b",
    "/tmp/a'\\",
    "[a",
    "{x}",
    "[a,b]",
    "x;y&z!",
    "<x>",
    "a{b",
    "2024_10",
    "1e5",
    "0123",
    "true",
    "%x@y|z",
    "a:b",
    "rnage(3)",
]


KEYS = [
    *("runs_dir", "results_dir", "data.root", "logger.entity"),
    *("eval.vae", "eval.reference", "eval.features_path", "eval.data_root"),
]


@pytest.mark.parametrize("first", range(0, len(PATHS), len(KEYS)))
@pytest.mark.parametrize("multirun", [False, True])
def test_a_path_arrives_as_it_was_written(first, multirun):
    paths = [path for path in PATHS[first:] if not (multirun and "," in path)]
    given = dict(zip(KEYS, paths, strict=False))
    words = [f"{key}={path}" for key, path in given.items()]
    jobs = compose_jobs(["-m", MHA, "seed=0,1", *words] if multirun else [MHA, *words])
    for job in jobs:
        assert {key: OmegaConf.select(job, key) for key in given} == given


def test_a_quoted_value_is_taken_out_of_its_quotes():
    for written in ("data.root='/tmp/a,b'", 'data.root="/tmp/a,b"'):
        assert compose_config([MHA, written]).data.root == "/tmp/a,b"
    assert compose_config([MHA, "data.root=null"]).data.root is None
    assert compose_config([MHA, "data.root=${runs_dir}/x"]).data.root == "runs/x"


REFUSED = [
    (
        [MHA, "data.root=/tmp/a,b"],
        "need -m (multirun): data.root=/tmp/a,b; \"data.root='/tmp/a,b'\"",
    ),
    (["-m", MHA, "data.root=/e=3,/e=4"], "write \"data.root='/e=3','/e=4'\""),
    (["-m", MHA, "data.root=a,,b"], "write \"data.root='a','','b'\""),
    ([MHA, "seed=0,1"], "several values for a key need -m (multirun): seed=0,1"),
    ([MHA, "seed=range(3)"], "several values for a key need -m (multirun): seed=range(3)"),
    (["experiment=glob(demo/vit/*)"], "several values for a key need -m (multirun)"),
    (["-m", "experiment=glob(demo/vt/*)"], "matches no experiment; nearest: demo/vit/mha"),
    (["-m", "experiment=glob([])"], "experiment=glob([])"),
    (["-m", "experiment=glob()"], "experiment=glob()"),
    (["-m", MHA, "seed=glob(*)"], "seed=glob(*): glob is for the options of a group"),
    (["-m", MHA, "seed=interval(0,1)"], "seed=interval(0,1): an interval"),
    (["-m", MHA, "optim.lr=tag(a,interval(0,1))"], "an interval"),
    (["-m", MHA, "seed=range(3,1)"], "seed=range(3,1): stands for no value"),
    (["-m", MHA, "seed=range(a)"], "seed=range(a): "),
    (["-m", MHA, "seed=range(0,1,0)"], "seed=range(0,1,0): "),
    (["-m", MHA, "seed=choice()"], "seed=choice(): "),
    (["-m", MHA, "seed=shuffle(interval(0,1))"], "seed=shuffle(interval(0,1)): "),
    (["-m", MHA, "seed=sort(1,a)"], "seed=sort(1,a): "),
    (["-m", MHA, "seed=int(a)"], "seed=int(a): "),
    (["-m", MHA, "seed=rnage(3)"], "seed='rnage(3)': must be a whole number"),
    (["-m", MHA, "seed=range(3"], "seed='range(3': must be a whole number"),
    (["table=head_ratio", "ratios=interval(0,1)"], "ratios=interval(0,1): an interval"),
    (["table=head_ratio", "family=glob(*)"], "family=glob(*): glob is for"),
    (["table=demo_vit", "seed=range(2,0)"], "seed=range(2,0): stands for no value"),
    (["table=glob(no*)"], "matches no table"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_values_that_cannot_be_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=r".") as caught:
        compose_jobs(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SWEEPS = [
    ("seed=range(3)", [0, 1, 2]),
    ("seed=range(1,6,2)", [1, 3, 5]),
    ("seed=choice(1,4)", [1, 4]),
    ("seed=choice(4)", [4]),
    ("seed=sort(3,1,2)", [1, 2, 3]),
    ("seed=sort(range(3),reverse=true)", [2, 1, 0]),
    ("seed=shuffle(range(1))", [0]),
    ("seed=int(1.5,2.5)", [1, 2]),
    ("seed=tag(a,choice(1,2))", [1, 2]),
    ("seed=int(3.7)", [3]),
    ("seed=5,6", [5, 6]),
]


@pytest.mark.parametrize(("override", "seeds"), SWEEPS)
def test_the_functions_of_hydras_grammar_stand_for_their_values(override, seeds):
    jobs = expand_jobs(parse_arguments(["-m", MHA, override]))
    assert jobs == [[MHA, f"seed={seed}"] for seed in seeds]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("glob(demo/vit/*)", ["demo/vit/mha", "demo/vit/moh_50", "demo/vit/moh_75"]),
        ("glob(demo/*t/moh_50)", ["demo/dit/moh_50", "demo/vit/moh_50"]),
        ("glob(demo/vit/mh?)", ["demo/vit/mha"]),
        ("glob([demo/vit/*],exclude=*moh*)", ["demo/vit/mha"]),
        ("glob(*,exclude=[llm/*,vit/*,dit/*,demo/l*,demo/s*])", None),
    ],
)
def test_a_glob_is_over_the_experiments_in_all_folders(pattern, names):
    if names is None:
        names = [name for name in experiments() if name.startswith(("demo/vit", "demo/dit"))]
    jobs = expand_jobs(parse_arguments(["-m", f"experiment={pattern}", "seed=1"]))
    assert jobs == [[f"experiment={name}", "seed=1"] for name in names]


def test_a_value_that_is_given_twice_is_one_run():
    assert len(compose_jobs(["-m", MHA, "seed=0,1", "seed=0,1"])) == 2
