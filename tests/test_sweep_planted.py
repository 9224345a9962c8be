"""On a circuit written by hand, sweeps find its heads and its positions, and nothing else."""

import numpy as np
import pytest

import headwater as hw
from headwater.planted import circuits

pytestmark = pytest.mark.planted
CLEAN = "When Anna and Boris went to the store Boris gave a drink to"
S1, S2, END = 4, 9, 13
HEADS = [circuits.DUPLICATE_NAME_HEAD, circuits.INHIBITION_HEAD, circuits.NAME_MOVER_HEAD]


@pytest.fixture(scope="module")
def planted():
    made = circuits.name_mover()
    return hw.load(made.model, tokenizer=made.tokenizer)


@pytest.fixture(scope="module")
def metric():
    return hw.logit_difference(" Anna", " Boris")


def test_the_positions_named_here_are_those_of_the_text(planted):
    strings = planted.token_strings(planted.tokenize(CLEAN).tokens[0].tolist())
    assert [i for i, s in enumerate(strings) if s.strip() == "Boris"] == [S1, S2]
    assert strings[END].strip() == "to"
    assert len(strings) == END + 1


def test_noising_every_head_finds_the_three_heads_of_the_circuit(planted, metric):
    corrupted = CLEAN.replace("Boris gave", "Clara gave")
    found = hw.patch(
        planted, CLEAN, corrupted, sites="z", over=("layer", "head"), direction="noise", metric=metric, progress=False
    ).table
    felt = found[found["effect"].abs() > 1e-3]
    assert sorted(zip(felt["layer"], felt["head"], strict=True)) == sorted(HEADS)


def test_denoising_by_position_finds_where_each_head_acts(planted, metric):
    corrupted = CLEAN.replace("Boris gave", "Clara gave")
    found = hw.patch(
        planted, CLEAN, corrupted, sites="z", over=("layer", "position", "head"), metric=metric, progress=False
    ).table
    felt = found[found["effect"].abs() > 1e-3]
    where = {(row.layer, row.head): row.position for row in felt.itertuples()}
    assert where == dict(zip(HEADS, (S2, END, END), strict=True))
    assert len(felt) == 3
    # With Boris looked away from, Anna and Clara share the name mover; only its own output leaves Anna alone.
    assert felt.sort_values("layer")["normalized_effect"].to_numpy() == pytest.approx([0.5, 0.5, 1], abs=1e-3)


def test_the_residual_stream_carries_the_answer_from_the_repeated_name_to_the_end(planted, metric):
    corrupted = CLEAN.replace("Boris gave", "Clara gave")
    sweep = hw.patch(planted, CLEAN, corrupted, sites="resid_pre", metric=metric, progress=False)
    effect = sweep.table.pivot(index="layer", columns="position", values="normalized_effect").to_numpy()
    expected = np.zeros((3, END + 1))
    expected[0, S2], expected[1, S2] = 1, 1
    # After the second layer S2 is only a name to copy (Boris twice, Anna once), and END looks away from Boris.
    expected[2, S2], expected[2, END] = -1 / 3, 1 / 2
    assert effect == pytest.approx(expected, abs=1e-3)


def test_knocking_out_the_edges_of_the_circuit_breaks_it_and_other_edges_do_not(planted, metric):
    edges = {
        "S2 reads S1": hw.Edges(S2, S1),
        "END reads S2": hw.Edges(END, S2),
        "END reads IO": hw.Edges(END, 2),
        "END reads S1": hw.Edges(END, S1),
        "store reads IO": hw.Edges(8, 2),
    }
    table = hw.knockout(planted, CLEAN, block=edges, metric=metric, over=("layer", "head"), progress=False).table
    felt = table[table["effect"] < -1e-3]
    assert {(row.site, row.layer, row.head) for row in felt.itertuples()} == {
        ("S2 reads S1", *circuits.DUPLICATE_NAME_HEAD),
        ("END reads S2", *circuits.INHIBITION_HEAD),
        ("END reads IO", *circuits.NAME_MOVER_HEAD),
    }
