"""Layers read ahead are the layers, in whatever order they are asked for."""

import dataclasses
import threading

import pytest
import torch

from headwater.errors import ModelError
from headwater.models.weights import LayersAhead, open_weights


@pytest.fixture
def source(checkpoint):
    """Weights that say they have 12 layers (3, again and again) and note which is read when, and in which thread."""
    weights = open_weights(checkpoint("llama"))
    weights.shape = dataclasses.replace(weights.shape, n_layers=12)
    weights.read, weights.threads, weights.broken, stored = [], set(), None, weights.ov

    def ov(layer):
        weights.read.append(layer)
        weights.threads.add(threading.current_thread())
        if layer == weights.broken:
            raise ModelError("damaged")
        return stored(layer % 3)

    weights.ov = ov
    return weights


def settle(ahead):
    """Wait for what is on its way."""
    if ahead._coming is not None:
        ahead._coming[1].exception()


def test_on_a_cpu_a_layer_is_read_when_it_is_asked_for_and_in_the_same_thread(source):
    with LayersAhead(source) as ahead:
        ahead(0)
    assert source.read == [0]
    assert source.threads == {threading.main_thread()}


def test_the_next_layer_is_read_before_it_is_asked_for_and_once(source):
    with LayersAhead(source, ahead=True) as ahead:
        for layer in range(12):
            ahead(layer)
            settle(ahead)
            assert source.read == list(range(min(12, layer + 2)))
    assert threading.main_thread() not in source.threads


def test_processes_that_share_the_layers_read_ahead_their_own(source):
    with LayersAhead(source, ahead=True) as ahead:
        for layer in (1, 5, 9):
            ahead(layer)
            settle(ahead)
    assert source.read == [1, 2, 5, 9]


def test_any_order_gives_each_layer_itself(checkpoint):
    weights = open_weights(checkpoint("llama"))
    with LayersAhead(weights, ahead=True) as ahead:
        for layer in (2, 1, 1, 0, 2):
            found = ahead(layer)
            assert found.layer == layer
            assert torch.equal(found.W_O, weights.ov(layer).W_O)


def test_an_error_reading_ahead_is_raised_when_that_layer_is_asked_for(source):
    source.broken = 1
    with LayersAhead(source, ahead=True) as ahead:
        ahead(0)
        with pytest.raises(ModelError, match="damaged"):
            ahead(1)


def test_leaving_ends_the_thread(source):
    with LayersAhead(source, ahead=True) as ahead:
        ahead(0)
    assert not any(thread.is_alive() for thread in source.threads)


@pytest.mark.gpu
def test_on_the_card_layers_read_ahead_are_those_read_on_the_cpu(checkpoint):
    here, there = open_weights(checkpoint("llama")), open_weights(checkpoint("llama"), device="cuda")
    with LayersAhead(there) as ahead:
        assert ahead.ahead
        for layer in range(3):
            found, expected = ahead(layer), here.ov(layer)
            for name in ("W_V", "W_O", "norm_gain"):
                assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
