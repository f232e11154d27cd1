"""The simulation: exact launches at every grain, the same as in real runs; readers, table, JSON, plot and command."""

import argparse
import gzip
import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from bench_check import tiny

import gluon_dynbatch as gdb
from benchmarks.systems.gluon import treelstm_sick, treelstm_sst
from cavs_core.mxnet_compat import autograd, gluon
from gluon_dynbatch.costs.cost_model import CostModel, Device, gpu
from gluon_dynbatch.policies import POLICIES
from gluon_dynbatch.studies import simulate as simulation
from gluon_dynbatch.studies.simulate import Row, add_arguments, plot, run, simulate, table, write_json
from gluon_dynbatch.studies.simulated_models import GRAINS, Grain, Model
from gluon_dynbatch.studies.simulated_samples import (
    SHAPES,
    chain,
    complete,
    generate,
    pair,
    random_binary,
    random_nary,
    read_sick,
    read_sst,
    rooted,
    sentence,
    tree_of_parents,
)
from gluon_dynbatch.sums import SUM_ROLES

SIMPLE = Device("simple", launch_us=10.0, op_us=2.0, gflops=1.0, rows_half=4.0, depth_half=5.0, element_ns=10.0,
                transcendental_ns=100.0, gather_ns_per_byte=1.0, flush_us=100.0, class_us=50.0, analysis_us=20.0,
                analysis_us_per_call=0.5, record_us_per_call=1.0, compile_s_per_kernel=0.5)
SICK, SST, TREES = (Model(name, hidden=6, embed=4) for name in ("sick", "sst", "trees"))
FORK = [[], [], [0, 1]]
TIMED = ("policy_ms", "analysis_ms", "step_ms", "times_alone", "times_operators")


def launches(samples, model, grain):
    """{policy: launches} of one mini-batch; the calls of all policies are the same."""
    rows = simulate(samples, model, [grain], batch=len(samples), devices=[SIMPLE])
    return {row.policy: row.launches for row in rows}


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


# ---- launches ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("grain, none, depth, agenda, cost", [
    # A leaf has 14 operators, the node 22. By depth: two sigmoids of a leaf are one launch, and so are four sigmoids
    # and three products of the node. Agenda multiplies by the first gates that it has, and again when all are there.
    # The losses of leaves can wait for that of the node: 5 launches fewer.
    ("operator", 2 * 14 + 22, 13 + 17, 13 + 18, 13 + 17 - 5),
    ("subgraph", 3, 2, 2, 2),
    ("graph", 3, 2, 2, 2),
])
def test_launches_of_a_binary_tree(grain, none, depth, agenda, cost):
    assert launches([sentence(FORK)], SST, grain) == {"none": none, "depth": depth, "agenda": agenda, "cost": cost}


def test_kernels_of_a_binary_tree():
    """An embedding is a clip and a lookup, a dense layer a product and a sum, a split a slice for each part."""
    leaf = 2 + 2 + 3 + 6 + (2 + 1 + 2 + 1 + 2)
    node = 1 + 2 + 5 + 3 + 6 + 3 + (2 + 1 + 2 + 1 + 2) + 2
    found = launches([sentence(FORK)], SST, "kernel")
    # Sigmoids and products share as above. The labels are clipped at depth 0 in leaves and node, so that is one more;
    # of the loss 7 other kernels are left that leaves and node can share.
    depth = (leaf - 1) + (node - 3 - 2 - 1)
    assert found == {"none": 2 * leaf + node, "depth": depth, "agenda": depth + 1, "cost": depth - 7}


@pytest.mark.parametrize("grain, none, depth", [
    ("subgraph-any", 6, 3),         # leaves; words with children; the pair
    ("subgraph", 6, 4),             # words with one child and with two
    ("graph", 6, 3),
])
def test_launches_of_a_pair(grain, none, depth):
    found = launches([pair(chain(2), FORK)], SICK, grain)
    assert found == {"none": none, "depth": depth, "agenda": depth, "cost": depth}


def test_agenda_and_cost_wait_where_depth_does_not():
    """The pairs of a shallow and of a deep sample have different depths, but nothing hurries the first."""
    samples = [pair(chain(1), chain(1)), pair(chain(2), chain(2))]
    assert launches(samples, SICK, "subgraph") == {"none": 8, "depth": 4, "agenda": 3, "cost": 3}


def test_at_graph_grain_only_equal_structures_share():
    a, b = sentence(FORK), sentence([[], [], [0, 1], [], [2, 3]])
    assert launches([a, b, a], SST, "subgraph")["depth"] == 3
    assert launches([a, b, a], SST, "graph") == {"none": 11, "depth": 5, "agenda": 5, "cost": 5}


def test_rows_of_launches():
    row, = simulate([rooted(FORK)] * 2, TREES, ["subgraph"], ["depth"], batch=2, devices=[SIMPLE])
    assert (row.calls, row.launches, row.remaining) == (8, 3, 3 / 8)        # 4 leaves, 2 forks, 2 roots
    assert (row.mean_rows, row.median_rows) == (8 / 3, 2)


def test_means_are_over_mini_batches_and_a_rest_is_left_out():
    samples = [sentence(FORK), sentence([[], [], [0, 1], [], [2, 3]]), sentence(FORK)]
    row, = simulate(samples[:2], SST, ["subgraph"], ["depth"], batch=1, devices=[SIMPLE])
    assert (row.samples, row.calls, row.launches) == (1, 4, 2.5)
    row, = simulate(samples, SST, ["subgraph"], ["depth"], batch=2, devices=[SIMPLE])
    assert (row.calls, row.launches) == (8, 3)


def _sick_sample(made):
    return pair(made.a.children, made.b.children)


@gdb.vertex
class CarryingNode(gluon.HybridBlock):
    """The simulated node: it hands the losses of all nodes below it on."""

    def __init__(self, model):
        super().__init__(prefix="")
        self.cell, self.out, self.cross_entropy = model.node, model.out, model.cross_entropy

    def hybrid_forward(self, F, label, left, right):
        hl, cl, below_left = left
        hr, cr, below_right = right
        h, c = self.cell(hl, cl, hr, cr)
        return h, c, self.cross_entropy(self.out(h), label) + below_left + below_right


class CarryingTreeLSTM(treelstm_sst.TreeLSTM):
    def __init__(self, workload):
        super().__init__(workload)
        self.at_leaf, self.at_node = treelstm_sst.LeafVertex(self), CarryingNode(self)

    def prepare(self, tree):
        return tree

    def forward(self, tree):
        states = []
        for word, left, right, label in zip(tree.words, tree.left, tree.right, tree.labels):
            states.append(self.at_leaf(word, label) if left < 0 else
                          self.at_node(label, states[left], states[right]))
        return states[-1][2]

    def losses(self, batch):
        return [self(tree) for tree in batch]


def _sst_sample(made):
    return sentence([[] if left < 0 else [left, right] for left, right in zip(made.left, made.right)])


@pytest.mark.parametrize("name, make_model, convert, model, vertex_grain", [
    ("treelstm-sick", treelstm_sick.VertexTreeLSTM, _sick_sample, SICK, "subgraph-any"),
    ("treelstm-sst", CarryingTreeLSTM, _sst_sample, SST, "subgraph"),
])
def test_the_same_launches_as_in_a_real_run(name, make_model, convert, model, vertex_grain, monkeypatch):
    # The study has a launch for every operator, where a real run may have one for a chain of additions.
    monkeypatch.setattr(SUM_ROLES, "chosen", lambda chains, names: np.zeros(len(chains.ends), bool))
    workload = tiny(name)
    net = make_model(workload)
    net.initialize()
    samples = [net.prepare(sample) for sample in workload.batch(0)]
    converted = [convert(sample) for sample in workload.batch(0)]
    for granularity, grain in (("vertex", vertex_grain), ("op", "operator"), ("graph", "graph")):
        for _ in range(2):                  # the first time meets lists of new lengths, which it cannot join yet
            with autograd.record(), gdb.batching("depth", granularity, "mxnet") as scope:
                net.losses(samples)
        row, = simulate(converted, model, [grain], ["depth"], batch=len(converted), devices=[SIMPLE])
        assert scope.stats.calls == row.calls, granularity
        if granularity == "op":             # joined operators are planned as one call, which may need fewer launches
            assert 0.9 * row.launches <= scope.stats.launches + scope.stats.joined <= row.launches
        else:
            assert scope.stats.launches == row.launches, granularity


@pytest.mark.parametrize("model", [SICK, SST, TREES], ids=lambda m: m.name)
def test_every_plan_is_checked(model, monkeypatch):
    checked, check_plan = [], simulation.check_plan
    monkeypatch.setattr(simulation, "check_plan", lambda *plan: checked.append(check_plan(*plan)))
    rows = simulate(generate(model.name, 6), model, batch=3, devices=[SIMPLE])
    assert [(row.grain, row.policy) for row in rows] == [(g, p) for g in model.grains for p in POLICIES]
    assert len(checked) == 2 * len(rows)


def test_a_wrong_plan_is_told(monkeypatch):
    wrong = type("Wrong", (), {"name": "depth", "plan": lambda self, problem: np.zeros_like(problem.call_class)})()
    monkeypatch.setitem(POLICIES, "depth", wrong)
    with pytest.raises(ValueError, match="which runs call 0 of class 0"):
        simulate([sentence(FORK)], SST, ["subgraph"], ["depth"], batch=1)


# ---- grains and policies against each other ------------------------------------------------------------------------

@pytest.mark.parametrize("model", [SICK, SST, TREES], ids=lambda m: m.name)
@pytest.mark.parametrize("seed", range(3))
def test_at_a_finer_grain_a_smaller_share_of_launches_remains(model, seed):
    """Not kernels: slices of different parts are different classes, while a split makes all parts at once."""
    rows = simulate(generate(model.name, 12, seed, "nary"), model, batch=12, devices=[SIMPLE])
    for policy in POLICIES:
        shares = [row.remaining for row in rows if row.policy == policy and row.grain not in ("kernel", "subgraph-any")]
        assert shares == sorted(shares)
        share = {row.grain: row.remaining for row in rows if row.policy == policy}
        assert share.get("subgraph-any", 0) <= share["subgraph"]
        assert share["kernel"] < 1.1 * share["operator"]


@pytest.mark.parametrize("model", [SICK, SST, TREES], ids=lambda m: m.name)
@pytest.mark.parametrize("device", [SIMPLE, gpu(5.0)], ids=lambda d: d.name)
def test_cost_is_never_predicted_slower(model, device):
    rows = simulate(generate(model.name, 16, 1), model, batch=8, devices=[device])
    compute = {(row.grain, row.policy): row.compute_ms for row in rows}
    for grain in model.grains:
        for policy in ("none", "depth", "agenda"):
            assert compute[grain, "cost"] <= compute[grain, policy] * (1 + 1e-9)


def test_equal_seeds_give_equal_figures():
    def figures(seed):
        rows = simulate(generate("sick", 8, seed), SICK, batch=4, devices=[SIMPLE])
        return [{name: value for name, value in asdict(row).items() if name not in TIMED} for row in rows]

    assert figures(3) == figures(3) != figures(4)


# ---- predictions ---------------------------------------------------------------------------------------------------

def test_work_is_the_same_at_all_grains():
    """Cutting a vertex into calls moves its products elsewhere, and neither adds nor drops one."""
    samples = generate("sick", 3) + [pair(complete(2, 3), chain(3))]
    children = np.mean([len(reads) for s in samples for k, reads in zip(*s) if reads and k == "word"])

    def flops(grain_name, direction):
        grain = Grain(SICK, grain_name, float(children))
        calls = grain.calls(samples)
        works = [grain.works[c][direction] for c in calls.call_class]
        return sum(m * n * k for work in works if work for m, n, k in (*work.products, *work.once_products))

    for direction in (0, 1):
        assert len({flops(grain, direction) for grain in ("kernel", "operator", "subgraph")}) == 1
        assert flops("subgraph-any", direction) == pytest.approx(flops("subgraph", direction))


def test_prediction_of_a_step():
    """Leaves in one launch, two forks in another; both directions, each with its own flush."""
    row, = simulate([sentence(FORK)] * 2, SST, ["subgraph"], ["depth"], batch=2, devices=[SIMPLE])
    grain = Grain(SST, "subgraph")
    grain.calls([sentence(FORK)])
    leaf, fork = grain.works
    expected = sum(CostModel(SIMPLE).predict_ms([(leaf[k], 4), (fork[k], 2)]) for k in (0, 1))
    assert row.compute_ms == pytest.approx(expected)
    assert row.analysis_ms == pytest.approx(row.policy_ms + 0.020 + 6 * 0.0015)
    assert row.step_ms == pytest.approx(row.analysis_ms + row.compute_ms)


def test_none_shares_nothing_and_analyzes_nothing():
    none, depth = simulate([sentence([[]])], SST, ["subgraph"], ["none", "depth"], batch=1, devices=[SIMPLE])
    assert none.compute_ms == pytest.approx(depth.compute_ms)               # a single call shares nothing anyway
    assert (none.policy_ms, none.analysis_ms, none.times_alone) == (0, 0, 1)
    two, = simulate([sentence([[]])] * 2, SST, ["subgraph"], ["none"], batch=2, devices=[SIMPLE])
    fixed_ms = 2 * (SIMPLE.flush_us + SIMPLE.class_us) / 1e3                # of a step and its one class
    assert two.compute_ms - fixed_ms == pytest.approx(2 * (none.compute_ms - fixed_ms))


def test_speed_ups_are_against_policy_none():
    rows = simulate(generate("trees", 8), TREES, devices=[SIMPLE, gpu(5.0)], batch=8)
    for device in ("simple", "described GPU"):
        step = {(row.grain, row.policy): row.step_ms for row in rows if row.device == device}
        for row in rows:
            if row.device == device:
                assert row.times_alone == pytest.approx(step[row.grain, "none"] / row.step_ms)
                assert row.times_operators == pytest.approx(step["operator", "none"] / row.step_ms)
    alone, = simulate(generate("trees", 8), TREES, ["graph"], ["none"], 8, [SIMPLE])    # without rows for operators
    assert alone in rows and alone.times_operators > 1


# ---- samples -------------------------------------------------------------------------------------------------------

def test_a_deep_chain():
    length = 100_000
    assert tree_of_parents([*range(1, length), -1]) == chain(length)
    found = launches([rooted(chain(length))], TREES, "subgraph")
    assert found == {"none": length + 1, "depth": length + 1, "agenda": length + 1, "cost": length + 1}
    row, = simulate([rooted(chain(length))], TREES, ["operator"], ["depth"], batch=1, devices=[SIMPLE])
    assert row.calls == 9 + (length - 1) * 20 + 5


def test_a_deep_bracket(tmp_path):
    (tmp_path / "sst").mkdir()
    depth = 20_000
    (tmp_path / "sst" / "train.txt").write_text("(1 (2 a) " * depth + "(2 b)" + ")" * depth + "\n")
    sample, = read_sst(tmp_path, 1)
    assert sample.kinds.count("node") == depth and sample.reads[-1] == [0, 2 * depth - 1]


def test_generated_trees():
    rng = np.random.RandomState(0)
    assert complete(2) == [[], [], [0, 1], [], [], [3, 4], [2, 5]] and chain(3) == [[], [0], [1]]
    for tree in (random_binary(rng, 20), random_nary(rng, 30), *(shape(rng) for shape in SHAPES.values())):
        assert sorted(w for below in tree for w in below) == list(range(len(tree) - 1))     # all but the root, once
        assert all(w < v for v, below in enumerate(tree) for w in below)
    tree = random_binary(rng, 20)
    assert len(tree) == 39 and {len(below) for below in tree} == {0, 2}
    assert generate("trees", 5, 1, "nary") == generate("trees", 5, 1, "nary") != generate("trees", 5, 2, "nary")


def write_sick(folder, a, b):
    (folder / "sick" / "train").mkdir(parents=True)
    for side, lines in (("a", a), ("b", b)):
        (folder / "sick" / "train" / f"{side}.parents").write_text("".join(f"{line}\n" for line in lines))


def test_sick_is_read(tmp_path):
    write_sick(tmp_path, ["2 3 0", "0"], ["2 0", "3 3 0"])
    first, second = pair([[], [0], [1]], [[], [0]]), pair([[]], FORK)
    assert sorted(read_sick(tmp_path, 2)) == sorted([first, second])
    assert len(read_sick(tmp_path, 5)) == 5         # from the front again
    assert read_sick(tmp_path, 5, seed=1) == read_sick(tmp_path, 5, seed=1)


@pytest.mark.parametrize("a, b, told", [
    (["2 0"], ["2 0", "0"], r"a.parents has 1 sentences, .*b.parents has 2; expected pairs"),
    (["2 0"], ["2 1"], r"b.parents, line 1: expected one root, found 0; expected the parent of each word"),
    (["0 0"], ["0"], r"a.parents, line 1: expected one root, found 2"),
    (["0 5"], ["0"], r"a.parents, line 1: vertex 2 has parent 5, but there are 2 vertices"),
    (["0 3 2"], ["0"], r"a.parents, line 1: 2 vertices are on a cycle, or below one"),
    (["0 x"], ["0"], r"a.parents, line 1: invalid literal"),
    ([], [], r"a.parents is empty"),
])
def test_bad_sick_files_are_told(tmp_path, a, b, told):
    write_sick(tmp_path, a, b)
    with pytest.raises(ValueError, match=told):
        read_sick(tmp_path, 1)


@pytest.mark.parametrize("packed", [False, True])
def test_sst_is_read(tmp_path, packed):
    (tmp_path / "sst").mkdir()
    text = "(3 (2 A) (3 (4 fine) (2 8\u00a01\\/2)))\r\n(2 yes)\n"       # a word may have a no-break space in it
    if packed:
        with gzip.open(tmp_path / "sst" / "train.txt.gz", "wt", encoding="utf-8", newline="") as file:
            file.write(text)
    else:
        (tmp_path / "sst" / "train.txt").write_bytes(text.encode())
    assert sorted(read_sst(tmp_path, 2)) == sorted([sentence([[], [], [], [1, 2], [0, 3]]), sentence([[]])])


@pytest.mark.parametrize("line, told", [
    ("(3 (2 A) (2 B)", "line 1: 1 brackets are open, and there are 0 trees"),
    ("(3 (2 A) (2 B)))", "line 1: the bracket that ends at character 16 closes nothing"),
    ("(3 (2 A))", "the node that ends at character 9 has 1 children"),
    ("(3 (2 A) (2 B) (2 C))", "has 3 children"),
    ("(3 (2 A) B)", "has 1 children"),
    ("(2 A) (2 B)", "0 brackets are open, and there are 2 trees"),
    ("(x (2 A) (2 B))", r"what is '\(x \(2 A\)"),
    ("", "there are 0 trees"),
])
def test_bad_sst_files_are_told(tmp_path, line, told):
    (tmp_path / "sst").mkdir()
    (tmp_path / "sst" / "train.txt").write_text(line + "\n")
    with pytest.raises(ValueError, match=rf"train.txt, line 1: .*{told.replace('line 1: ', '')}.*expected a binary"):
        read_sst(tmp_path, 1)


@pytest.mark.parametrize("read", [read_sick, read_sst])
def test_a_missing_file_is_told_with_the_way_out(tmp_path, read):
    with pytest.raises(ValueError, match=r"there is no .*train.*--data"):
        read(tmp_path, 1)


# ---- mistakes ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, told", [
    ({"grains": ["vertex"]}, "grain 'vertex': expected some of kernel, operator, subgraph, graph"),
    ({"grains": ["subgraph-any"]}, "grain 'subgraph-any': expected some of"),
    ({"grains": []}, "expected at least one grain"),
    ({"policies": ["auto"]}, "policy 'auto': expected some of none, depth, agenda, cost"),
    ({"batch": 5}, "4 samples in mini-batches of 5: expected at least one mini-batch"),
    ({"batch": 0}, "4 samples in mini-batches of 0"),
    ({"model": SICK}, "a sample has a vertex 'leaf', but model sick has the cells word, pair"),
])
def test_mistakes_are_told(change, told):
    arguments = {"samples": generate("sst", 4), "model": SST, "batch": 4, **change}
    with pytest.raises(ValueError, match=told):
        simulate(**arguments)


@pytest.mark.parametrize("arguments, told", [
    (("lstm",), "model 'lstm': expected one of sick, sst, trees"),
    (("sst", 0), "hidden 0 and embedding 300: expected positive numbers"),
])
def test_bad_models_are_told(arguments, told):
    with pytest.raises(ValueError, match=told):
        Model(*arguments)
    with pytest.raises(ValueError, match="grain 'op': expected one of"):
        Grain(SST, "op")


# ---- what is read --------------------------------------------------------------------------------------------------

def numbers_of(line):
    return [float(word.replace(",", "").rstrip("%")) for word in line.split()[2:]]


def test_table_and_json_have_the_same_numbers(tmp_path):
    devices = [SIMPLE, replace(gpu(5.0), name="a GPU")]
    rows = simulate(generate("sick", 8), SICK, batch=4, devices=devices)
    write_json(tmp_path / "new" / "rows.json", rows, {"model": "sick"}, devices)
    content = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert content["settings"] == {"model": "sick"} and [d["name"] for d in content["devices"]] == ["simple", "a GPU"]
    assert [Row(**row) for row in content["rows"]] == rows
    text = table(rows, "a title")
    assert text.startswith("a title\n\nsimple\n") and "\na GPU\n" in text and text.count("\n* ") == 2
    lines = [line[2:] for line in text.splitlines() if re.match(rf"[* ] ({'|'.join(GRAINS)}) ", line)]
    assert len(lines) == len(content["rows"])
    for line, row in zip(lines, content["rows"]):
        assert line.split()[:2] == [row["grain"], row["policy"]]
        row["remaining"] *= 100
        shown = {field: value for field, value in row.items() if field not in ("device", "grain", "policy", "samples")}
        assert numbers_of(line) == [pytest.approx(value, abs=0.51 if field == "calls" else 0.051)
                                    for field, value in shown.items()]


def test_plots_are_written(tmp_path):
    rows = simulate(generate("sick", 4), SICK, batch=4, devices=[SIMPLE, replace(gpu(5.0), name="a GPU")])
    assert plot(rows, tmp_path / "new" / "grains") == [str(tmp_path / "new" / f"grains.{e}") for e in ("png", "svg")]
    assert (tmp_path / "new" / "grains.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "new" / "grains.svg").read_text()
    some = [row for row in rows if row.policy == "none"]                    # nothing to draw a line through
    assert plot(some, tmp_path / "none.svg") == [str(tmp_path / "none.svg")]


# ---- the command ---------------------------------------------------------------------------------------------------

def test_the_command_with_generated_trees(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert run(options("--model", "trees", "--shape", "chain", "--batch", "4", "--samples", "8", "--hidden", "5",
                       "--embed", "3", "--seed", "2", "--grains", "operator,graph", "--policies", "none,depth",
                       "--gpu-launch-us", "7.5", "--plot", str(tmp_path / "plot"), "--json", str(path))) == 0
    said = capsys.readouterr()
    assert said.out.startswith("simulated: model trees, data generated chain trees, batch 4, mini-batches 2, hidden 5")
    assert "described GPU, 7.5 us to start a kernel" in said.out and "simulating" in said.err
    content = json.loads(path.read_text())
    assert [(row["grain"], row["policy"]) for row in content["rows"]] == 2 * [
        ("operator", "none"), ("operator", "depth"), ("graph", "none"), ("graph", "depth")]
    assert (tmp_path / "plot.png").exists() and (tmp_path / "plot.svg").exists()


def test_the_command_reads_data(tmp_path, monkeypatch, capsys):
    write_sick(tmp_path, ["2 3 0"], ["2 0"])
    few = ["--batch", "2", "--samples", "2", "--hidden", "4", "--embed", "3", "--grains", "subgraph"]
    assert run(options("--data", str(tmp_path), *few)) == 0
    assert "model sick, data real" in capsys.readouterr().out
    monkeypatch.setenv("DYNBATCH_BENCH_DATA", str(tmp_path))
    assert run(options(*few)) == 0
    assert "model sick, data real" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there is no .*train.txt; name a folder that has it with --data"):
        run(options("--model", "sst", *few))


def test_without_data_look_alikes_are_generated(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DYNBATCH_BENCH_DATA", raising=False)
    monkeypatch.setattr(simulation, "__file__", str(tmp_path / "clone" / "gluon_dynbatch" / "simulate.py"))
    for model in ("sick", "sst"):
        assert run(options("--model", model, "--samples", "4", "--batch", "4", "--grains", "subgraph")) == 0
        said = capsys.readouterr()
        assert "data generated look-alikes" in said.out and "--data DIR or DYNBATCH_BENCH_DATA names one" in said.err


@pytest.mark.parametrize("arguments, told", [
    (["--data", "/no/such/folder"], "there is no data folder /no/such/folder; without"),
    (["--gpu-launch-us", "5,fast"], "--gpu-launch-us fast: expected microseconds"),
    (["--model", "trees", "--samples", "3"], "3 samples in mini-batches of 32"),
])
def test_mistakes_of_the_command_are_told(arguments, told):
    with pytest.raises(ValueError, match=told):
        run(options(*arguments))
