"""Tuning: every setting runs and is told, nothing is left changed, and the winner can be kept and used again."""

import argparse
import json
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch.costs.calibrate import fingerprint
from gluon_dynbatch.studies import profiles
from gluon_dynbatch.studies import tuning as module
from gluon_dynbatch.studies.profiles import OPTIONS, ProfileError, load_profile, save_profile
from gluon_dynbatch.studies.tuning import Row, Setting, TuneError, TuneReport, add_arguments, pareto_front, run, tune

nd, nn = mx.nd, gluon.nn
HIDDEN = 4


class Chain(gluon.Block):
    """A loss for a sequence of word numbers."""

    def __init__(self, sparse=False):
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(10, HIDDEN, sparse_grad=sparse)
            self.dense = nn.Dense(HIDDEN, in_units=2 * HIDDEN, activation="tanh")
            self.out = nn.Dense(1, in_units=HIDDEN)

    @gdb.vertex
    def cell(self, F, word, h):
        return self.dense(F.concat(self.embed(word), h, dim=1))

    def forward(self, words):
        h = nd.zeros((1, HIDDEN))
        for word in words:
            h = self.cell(nd, word, h)
        return self.out(h) ** 2


SAMPLES = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 1], [2, 3]]


def make_net(**options):
    net = Chain(**options)
    net.initialize(mx.init.Xavier())
    return net


def quickly(fn, samples=SAMPLES, **options):
    """Tune with few settings unless others are named, without a compiler."""
    options = {"policies": ["depth"], "granularities": ["vertex"], "batch_sizes": [2], "steps": 1, "backend": "mxnet",
               "progress": False, **options}
    return tune(fn, samples, **options)


# ---- settings --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def everything():
    """The report of all settings, and every loss that was made on the way: sample -> arrays."""
    mx.random.seed(3)
    net, losses = make_net(), [[] for _ in SAMPLES]

    def fn(numbered):
        k, words = numbered
        losses[k].append(net(words))
        return losses[k][-1]

    report = tune(fn, list(enumerate(SAMPLES)), steps=2, backend="mxnet", progress=False)
    return net, report, losses


def test_every_setting_has_a_row(everything):
    _, report, _ = everything
    expected = {Setting(p, g, b) for p in module.POLICIES for g in module.GRANULARITIES for b in (1, 4)}
    assert {row.setting for row in report.rows} == expected and len(report.rows) == len(expected)
    assert not report.skipped
    for row in report.rows:
        assert row.launches >= 1 and row.rows_per_launch >= 1 and row.backend == "mxnet"
        assert min(row.analyze_ms, row.record_ms, row.forward_ms, row.backward_ms) > 0
        assert row.total_ms >= row.measured_ms
        assert row.samples_per_second == pytest.approx(row.batch / row.total_ms * 1e3)
        assert row.policy == "auto" or row.method == f"{row.policy} at {row.granularity} grain"


def test_policies_and_granularities_do_what_they_say(everything):
    """A launch a call, or shared ones; and an operator is less than a vertex."""
    _, report, _ = everything
    rows = {row.setting: row for row in report.rows}
    alone, shared, ops = (rows[Setting(*s, 4)] for s in (("none", "vertex"), ("depth", "vertex"), ("depth", "op")))
    assert alone.rows_per_launch == 1 and shared.rows_per_launch > 1.5
    assert shared.launches < alone.launches and shared.launches < ops.launches


def test_losses_are_those_of_the_plain_loop_in_all_settings(everything):
    net, report, losses = everything
    for words, found in zip(SAMPLES, losses):
        assert len(found) >= len(report.rows)
        np.testing.assert_allclose([x.asnumpy() for x in found], [net(words).asnumpy()] * len(found), rtol=1e-4)


def test_the_best_has_the_most_samples_a_second(everything):
    _, report, _ = everything
    assert report.best.samples_per_second == max(row.samples_per_second for row in report.rows)


def test_table_has_every_setting_and_marks_the_best(everything):
    _, report, _ = everything
    assert str(report) == report.table()
    title, head, *lines, last = report.table().splitlines()
    told = {tuple(line.lstrip("* ").split()[:3]) for line in lines}
    assert told == {(s.policy, s.granularity, str(s.batch)) for s in (row.setting for row in report.rows)}
    (marked,) = [line for line in lines if line.startswith("*")]
    assert marked.split()[1:4] == [report.best.policy, report.best.granularity, str(report.best.batch)]
    assert str(report.best.setting) in last and "samples/s" in head and "training" in title
    ends = {re.match(r"(\*? +\w+ +\w+ +\d+)", line).end() for line in lines}
    assert len(ends) == 1, "columns are not aligned"


def test_inference_runs_no_backward_pass_and_takes_lists():
    net = make_net()
    (row,) = quickly(lambda words: [net(words), net(words)], train=False).rows
    assert row.backward_ms == 0 and row.forward_ms > 0


def test_native_backend_is_predicted_and_policy_auto_may_choose_before_it_is_measured():
    """One kind of call needs few kernels."""
    x, calls = nd.ones((1, 4)), []
    x.attach_grad()
    report = quickly(lambda factor: calls.append(factor) or nd.tanh(x * factor), [nd.ones((1, 4))] * 4,
                     policies=["auto"], batch_sizes=[4], backend="native")
    (row,) = report.rows
    assert row.backend == "native" and row.predicted_ms > 0
    assert len(calls) >= 4 * module._AUTO_STEPS
    assert f"ran {row.method}" in report.table()


def test_auto_backend_obeys_the_environment(monkeypatch):
    net = make_net()
    monkeypatch.setenv("DYNBATCH_BACKEND", "mxnet")
    assert quickly(net, backend="auto").rows[0].backend == "mxnet"


def test_batch_sizes_are_powers_of_four_by_default():
    x = nd.ones((1,))
    report = quickly(lambda sample: x * 2, range(20), batch_sizes=None, train=False)
    assert [row.batch for row in report.rows] == [1, 4, 16]


def test_settings_named_twice_are_measured_once():
    assert len(quickly(make_net(), policies=["depth", "depth"], batch_sizes=[2, 2]).rows) == 1


def test_slow_policy_none_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(module, "_MOST_MS", 0.0)
    report = quickly(make_net(), policies=["none", "depth"])
    assert [row.policy for row in report.rows] == ["depth"]
    ((setting, reason),) = report.skipped.items()
    assert setting == Setting("none", "vertex", 2) and "more than 0 s" in reason
    (line,) = [line for line in report.table().splitlines() if "skipped" in line]
    assert line.split()[:3] == ["none", "vertex", "2"] and line.endswith(f"skipped: {reason}")
    with pytest.raises(TuneError, match="all settings were skipped"):
        quickly(make_net(), policies=["none"])


def test_a_step_that_compiles_does_not_count():
    """A sample with an operator of its own: whoever meets it first, goes on to another mini-batch."""
    timer = module._Timer(lambda sample: getattr(nd, sample)(nd.ones((1, 2)) * 2), ["tanh", "relu", "sigmoid"], False,
                          "mxnet", 100)
    setting = Setting("depth", "vertex", 3)
    assert timer._step(setting, 0).is_new and not timer._step(setting, 1).is_new
    timer.samples = ["exp", "relu", "sigmoid"]
    assert not timer.measure(setting, 2).is_new and next(timer.spare) == 101


def test_settings_of_a_size_run_the_same_samples():
    seen = []
    timer = module._Timer(lambda sample: seen.append(sample) or nd.ones((1, 2)) * 2, list(range(9)), False, "mxnet", 5)
    seen.clear()
    for policy in ("depth", "cost"):
        timer._step(Setting(policy, "vertex", 4), 0)
    assert sorted(seen[:4]) == sorted(seen[4:]) and len(set(seen)) == 4


def test_progress_is_shown_on_stderr(capsys):
    quickly(make_net(), progress=True)
    captured = capsys.readouterr()
    assert "tuning" in captured.err and not captured.out


# ---- what is left behind ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_parameters_and_gradients_are_as_before(sparse, grad_req):
    net, other = make_net(sparse=sparse), nd.ones((3,))
    other.attach_grad()
    net.collect_params().setattr("grad_req", grad_req)
    with autograd.record():
        loss = net([1, 2]) + other.sum()
    loss.backward()

    def state():
        return {name: (p.data().asnumpy(), p.grad().asnumpy(), p.data()._fresh_grad)
                for name, p in net.collect_params().items()}

    before = state()
    assert np.abs(before[net.dense.weight.name][1]).max() > 0
    quickly(lambda words: net(words) + (other * 7).sum(), policies=["none", "depth"], granularities=["op", "vertex"])
    for name, (value, grad, fresh) in state().items():
        np.testing.assert_array_equal(value, before[name][0], name)
        np.testing.assert_array_equal(grad, before[name][1], name)
        assert fresh == before[name][2], name
    assert other.grad.asnumpy().tolist() == [1, 1, 1]


def test_running_means_are_as_before():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=2), nn.BatchNorm(in_channels=3))
    net.initialize()
    before = net[1].running_mean.data().asnumpy()
    quickly(lambda x: net(x), [nd.array([[k, 5.0], [2.0, k]]) for k in range(4)])
    np.testing.assert_array_equal(net[1].running_mean.data().asnumpy(), before)


def test_parameters_that_get_their_shape_on_the_way_have_zero_gradients():
    first, second = nn.Dense(2), nn.Dense(2)            # no in_units: the first call tells; the second waits longer
    for block in (first, second):
        block.initialize(mx.init.One())
    quickly(lambda k: (second if k else first)(nd.ones((1, 3))), range(4), batch_sizes=[4])
    for block in (first, second):
        assert np.abs(block.weight.grad().asnumpy()).max() == 0


def test_gradients_are_as_before_after_an_error():
    net = make_net()
    calls = []

    def fn(words):
        calls.append(words)
        if len(calls) > 10:
            raise KeyError("late")
        return net(words)

    with pytest.raises(TuneError, match="late"):
        quickly(fn, steps=9)
    assert np.abs(net.dense.weight.grad().asnumpy()).max() == 0


# ---- mistakes --------------------------------------------------------------------------------------------------------

def test_an_error_of_fn_names_sample_and_setting():
    net = make_net()

    def fn(words):
        if len(words) == 4:
            raise ZeroDivisionError("mine")
        return net(words)

    with pytest.raises(TuneError) as caught:
        quickly(fn, policies=["cost"], batch_sizes=[5])
    assert isinstance(caught.value, gdb.DynBatchError) and isinstance(caught.value.__cause__, ZeroDivisionError)
    told = 'fn(samples[3]) failed with policy="cost", granularity="vertex", batch 5: ZeroDivisionError: mine'
    assert told in str(caught.value)


def test_an_error_of_the_mini_batch_names_the_setting():
    with pytest.raises(TuneError, match='the mini-batch failed with policy="depth"'):
        quickly(lambda sample: nd.ones((2,)) * 2)       # nothing to differentiate


@pytest.mark.parametrize("made", [3.0, [], [None]])
def test_fn_must_return_arrays(made):
    with pytest.raises(TuneError, match=r"fn\(samples\[0\]\) failed outside of a scope: TypeError: it returned .*; "
                                        "expected an array"):
        quickly(lambda sample: made)


def test_inside_a_scope_it_says_so():
    net = make_net()
    with gdb.batching():
        with pytest.raises(TuneError, match="inside a batching scope"):
            quickly(net)


@pytest.mark.parametrize("options, told", [
    ({"samples": []}, "no samples"),
    ({"policies": []}, "at least one policy"),
    ({"policies": ["deep"]}, "expected one of auto, none"),
    ({"granularities": ["tree"]}, "expected one of auto, op"),
    ({"backend": "cuda"}, "expected one of"),
    ({"batch_sizes": [6]}, "batch size 6; expected 1 to 5"),
    ({"batch_sizes": [0]}, "batch size 0; expected 1 to 5"),
    ({"steps": 0}, "0 steps; expected at least 1"),
])
def test_wrong_arguments_are_told(options, told):
    with pytest.raises(ValueError, match=told):
        quickly(make_net(), **options)


# ---- plot ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("points, front", [
    ([], []),
    ([(1, 1)], [0]),
    ([(1, 1), (2, 2), (3, 3)], [0, 1, 2]),
    ([(3, 3), (1, 1), (2, 2)], [1, 2, 0]),              # by rising cost
    ([(1, 5), (2, 2), (3, 6), (3, 5)], [0, 2]),         # dominated: dearer and worse; as dear and worse
    ([(1, 5), (2, 5)], [0]),                            # as good and dearer
    ([(2, 5), (2, 7)], [1]),                            # as dear and worse
    ([(1, 1), (2, 4), (1, 1), (2, 4)], [0, 2, 1, 3]),   # equal points do not beat each other
])
def test_pareto_front(points, front):
    assert pareto_front(points) == front


def test_pareto_front_by_definition():
    points = [tuple(p) for p in np.random.RandomState(2).randint(0, 12, (60, 2)).tolist()]
    unbeaten = [k for k, (x, y) in enumerate(points)
                if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)]
    assert sorted(pareto_front(points)) == unbeaten


def test_plot_writes_what_the_ending_says(everything, tmp_path):
    _, report, _ = everything
    assert report.plot(tmp_path / "a.png") == [str(tmp_path / "a.png")]
    assert report.plot(str(tmp_path / "b.svg")) == [str(tmp_path / "b.svg")]
    assert report.plot(tmp_path / "both") == [str(tmp_path / "both.png"), str(tmp_path / "both.svg")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.svg", "both.png", "both.svg"]
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert len(content) > 5000 and (content.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in content)


# ---- profiles --------------------------------------------------------------------------------------------------------

def a_row(**changes):
    numbers = {name: 1.0 for name in Row.__dataclass_fields__ if name not in ("policy", "granularity", "batch")}
    return Row(**{**numbers, "policy": "cost", "granularity": "op", "batch": 4, "method": "", "backend": "", **changes})


def test_a_saved_report_is_a_profile(tmp_path):
    slow, fast = a_row(), a_row(policy="depth", granularity="graph", samples_per_second=9.0)
    report = TuneReport([slow, fast], {Setting("none", "op", 4): "slow"}, "a title")
    report.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == {"policy": "depth", "granularity": "graph"}
    kept = json.loads((tmp_path / "p.json").read_text())
    assert kept["batch"] == 4 and kept["version"] == gdb.__version__ and "cores" in kept["machine"]
    assert [Row(**row) for row in kept["table"]] == [slow, fast]
    assert kept["skipped"] == [{"policy": "none", "granularity": "op", "batch": 4, "reason": "slow"}]
    replace(report, backend="mxnet").save(tmp_path / "p.json")
    found = load_profile(str(tmp_path / "p.json"))
    assert found == {"policy": "depth", "granularity": "graph", "backend": "mxnet"}
    with gdb.batching(**found) as scope:
        assert scope.config.policy == "depth"


def test_a_profile_is_read_once_and_its_options_are_a_copy(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    save_profile(path, {"policy": "cost", "granularity": "op"})
    load_profile(path)["policy"] = "mine"
    monkeypatch.setattr(profiles.json, "loads", None)
    assert load_profile(path)["policy"] == "cost"


def profile(**changes):
    return {"kind": "gluon_dynbatch profile", "version": gdb.__version__, "machine": fingerprint(),
            "options": {"policy": "cost", "granularity": "op"}, **changes}


@pytest.mark.parametrize("content, told", [
    (b"\xff\xfe\x00", "is not a profile"),
    (b"{", "is not a profile"),
    (b"[]", "is not a profile"),
    (b"{}", "is not a profile"),
    (json.dumps(profile(options=3)).encode(), "is not a profile"),
    (json.dumps(profile(options={"policy": "cost", "granularity": "op", "colour": "red"})).encode(),
     f"has an option 'colour'; expected {', '.join(OPTIONS)}"),
    (json.dumps(profile(options={"policy": "deep", "granularity": "op"})).encode(),
     "says policy='deep'; expected one of auto, none"),
    (json.dumps(profile(options={"policy": ["cost"], "granularity": "op"})).encode(), r"says policy=\['cost'\]"),
    (json.dumps(profile(options={"policy": "cost"})).encode(), "does not say granularity; tune again"),
])
def test_what_is_no_profile_is_told(content, told, tmp_path):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ProfileError, match=told) as caught:
        load_profile(tmp_path / "p.json")
    assert isinstance(caught.value, gdb.DynBatchError) and str(tmp_path / "p.json") in str(caught.value)


def test_a_missing_profile_is_told(tmp_path):
    with pytest.raises(ProfileError, match=r"cannot be read \(No such file.*dynbatch tune .. --profile"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path)


def test_save_profile_checks_its_options(tmp_path):
    with pytest.raises(ProfileError, match="says backend='cuda'"):
        save_profile(tmp_path / "p.json", {"policy": "cost", "granularity": "op", "backend": "cuda"})
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("changes, told", [
    ({"version": "0.0.1", "machine": "elsewhere"}, "made with gluon_dynbatch 0.0.1, this is .*tune again"),
    ({"machine": "elsewhere"}, "made on elsewhere, this is .*tune again"),
])
def test_another_version_or_machine_is_warned_of(changes, told, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(profile(**changes)))
    with pytest.warns(UserWarning, match=told) as caught:
        assert load_profile(tmp_path / "p.json") == {"policy": "cost", "granularity": "op"}
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")                  # a scope is entered in every step: one warning is enough
        load_profile(tmp_path / "p.json")


# ---- the command -----------------------------------------------------------------------------------------------------

MODEL = """
from cavs_core.mxnet_compat import mx
import helper

def make():
    x = mx.nd.ones((1, 3))
    x.attach_grad()
    return (lambda k: (x * helper.FACTOR).tanh()), range(100)

def wrong():
    return 3
"""


def options_of(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sys, "path", list(module.sys.path))
    monkeypatch.setattr(module.sys, "modules", dict(module.sys.modules))
    (tmp_path / "tuned_model.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("FACTOR = 2")
    return tmp_path


def test_the_command_tunes_a_file(folder, capsys):
    plot, kept = folder / "plot", folder / "profile.json"
    assert run(options_of(f"{folder}/tuned_model.py:make", "--samples", 5, "--policies", "depth,cost",
                          "--granularities", "op,vertex", "--batch-sizes", "2,5", "--steps", 1, "--plot", plot,
                          "--profile", kept)) == 0
    captured = capsys.readouterr()
    assert "tuning" in captured.err
    assert captured.out.startswith("5 samples, training; medians of 1 steps")
    assert len(re.findall(r"^\*? +(depth|cost) +(op|vertex) +[25] ", captured.out, re.M)) == 8
    assert f"{plot}.png, {plot}.svg" in captured.out and f"gdb.batching(profile={str(kept)!r})" in captured.out
    assert set(load_profile(kept)) == {"policy", "granularity"}


def test_the_command_tunes_a_module(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert run(options_of("tuned_model:make", "--samples", 2, "--policies", "depth", "--granularities", "vertex",
                          "--batch-sizes", 2, "--steps", 1)) == 0
    assert "* the fastest" in capsys.readouterr().out


def test_the_command_has_a_demo(capsys):
    assert run(options_of("--demo", "--samples", 4, "--policies", "cost", "--batch-sizes", 4, "--steps", 1)) == 0
    assert "4 samples, training" in capsys.readouterr().out


def test_trees_of_the_demo_are_trees():
    fn, samples = module._demo(40)
    for tree, label in samples:
        height = 0
        for word in tree:
            assert word is not None or height >= 2
            height += 1 if word is not None else -1
        assert height == 1 and label in (0, 1)
    assert fn(samples[0]).shape == (1,)


@pytest.mark.parametrize("arguments, told", [
    ([], "expected a target, MODULE_OR_FILE:FUNCTION, or --demo"),
    (["model.py:make", "--demo"], "expected a target"),
    (["model.py"], "expected MODULE_OR_FILE:FUNCTION"),
    (["/no/such/file.py:make"], "there is no file /no/such/file.py"),
    (["no_such_module:make"], "the module no_such_module cannot be imported"),
    (["{folder}/tuned_model.py:other"], "has no function other"),
    (["{folder}/tuned_model.py:wrong"], "returned int; expected a tuple"),
    (["--demo", "--samples", "0"], "--samples 0: expected at least 1"),
])
def test_mistakes_in_the_command_are_told(arguments, told, folder):
    with pytest.raises(ValueError, match=re.escape(told)):
        run(options_of(*[argument.format(folder=folder) for argument in arguments]))


def test_lists_of_numbers_are_checked_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        options_of("--demo", "--batch-sizes", "1,x")
    assert "invalid numbers value" in capsys.readouterr().err
