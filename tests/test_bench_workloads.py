"""The workloads of the benchmarks: the same in every process, children before parents, sizes as in the real data."""

import gzip

import numpy as np
import pytest
from bench_check import TINY, tiny

from benchmarks import workloads
from benchmarks.workloads import graphconv, treelstm_sick, treelstm_sst, varlstm
from benchmarks.workloads.base import DATA_VARIABLE, data_folder, read_text


@pytest.mark.parametrize("name", workloads.ALL)
def test_the_same_arguments_give_the_same_workload(name):
    first, second = tiny(name), tiny(name)
    assert first.samples[0] is not second.samples[0]
    assert [repr(s) for s in first.samples] == [repr(s) for s in second.samples]
    for key, value in first.params.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, second.params[key])


@pytest.mark.parametrize("name", workloads.ALL)
def test_batches_and_products_have_the_sizes_of_the_options(name):
    made = tiny(name, num_batches=3)
    assert made.num_batches == 3 and not made.real
    assert [len(made.batch(k)) for k in range(4)] == [TINY[name]["batch"]] * 4
    assert made.batch(3) == made.batch(0)
    shapes = {value.shape for value in made.params.values()}
    for rows, inputs, outputs in made.products(made.batch(0)):
        assert rows > 0 and (outputs, inputs) in shapes


def test_options_are_checked():
    assert workloads.options_of("treelstm-sst", hidden=50, batch=None)["hidden"] == 50
    with pytest.raises(ValueError, match="no option leaves"):
        workloads.options_of("treelstm-sst", leaves=3)
    with pytest.raises(ValueError, match="positive"):
        workloads.options_of("treelstm-sst", batch=0)
    with pytest.raises(ValueError, match="there is no workload 'tree'"):
        workloads.options_of("tree")
    with pytest.raises(ValueError, match="power of 2"):
        workloads.make("treefc", workloads.options_of("treefc", leaves=12), 1, None)


def test_brackets_become_a_tree_with_children_first():
    tree = treelstm_sst.parse("(3 (2 A) (3 (4 fine) (2 film)))", {"A": 0, "fine": 1, "film": 2})
    assert tree.words == [0, 1, 2, -1, -1]
    assert (tree.left, tree.right) == ([-1, -1, -1, 1, 0], [-1, -1, -1, 2, 3])
    assert tree.labels == [2, 4, 2, 3, 3] and tree.num_leaves == 3


def test_a_dependency_tree_is_numbered_children_first():
    tree = treelstm_sick.make_tree([10, 11, 12, 13], [1, -1, 1, 2])
    assert tree.words[-1] == 11 and tree.parents[-1] == -1
    assert all(child < v for v, below in enumerate(tree.children) for child in below)
    assert sorted(tree.words[child] for child in tree.children[-1]) == [10, 12]


def test_a_score_becomes_a_distribution():
    np.testing.assert_allclose(treelstm_sick.distribution(3.4), [[0, 0, 0.6, 0.4, 0]], atol=1e-6)
    np.testing.assert_allclose(treelstm_sick.distribution(5), [[0, 0, 0, 0, 1]])
    np.testing.assert_allclose(treelstm_sick.distribution(1), [[1, 0, 0, 0, 0]])


def test_smiles_become_atoms_and_bonds():
    atoms, neighbours = graphconv.parse("C[C@H](Cl)c1ccccc1.[Na+]")
    assert atoms == ["C", "C", "Cl", "c", "c", "c", "c", "c", "c", "Na"]
    assert neighbours[1] == [0, 2, 3] and sorted(neighbours[3]) == [1, 4, 8] and neighbours[9] == []


def mean_and_spread(sizes):
    return pytest.approx((np.mean(sizes), np.std(sizes)), rel=0.25)


def test_generated_data_looks_like_the_real_data():
    """The means are those of the data's own description."""
    sst, _ = treelstm_sst.generate(2000)
    assert mean_and_spread([tree.num_leaves for tree in sst]) == (19.1, 9.3)
    sick, _ = treelstm_sick.generate(2000)
    assert mean_and_spread([len(pair.a.words) for pair in sick]) == (9.7, 3.7)
    assert mean_and_spread([len(s) - 2 for s in varlstm.generate(2000, 100)]) == (16.3, 12.5)
    molecules, _ = graphconv.generate(500)
    assert mean_and_spread([len(m.atoms) for m in molecules]) == (27.0, 7.4)
    assert all(v in m.neighbours[u] for m in molecules for v, around in enumerate(m.neighbours) for u in around)


@pytest.mark.parametrize("name", [name for name in workloads.ALL if name != "treefc"])
def test_real_data_is_read_where_it_is(name):
    folder = data_folder()
    if folder is None:
        pytest.skip("no real data beside the clone")
    made = tiny(name, data=folder)
    assert made.real and len(made.samples) == 2 * TINY[name]["batch"]


def test_the_data_folder_can_be_named(tmp_path, monkeypatch):
    assert data_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert data_folder() == tmp_path
    with pytest.raises(ValueError, match="there is no data folder"):
        data_folder(str(tmp_path / "missing"))


def test_packed_and_plain_files_are_read(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("packed")
    assert [read_text(tmp_path / name) for name in ("a.txt", "b.txt")] == ["plain", "packed"]
