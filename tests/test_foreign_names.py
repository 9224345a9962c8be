"""Names and options of other libraries: what is said of them exists, and none of them is one of headwater's."""

import copy
import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.figures.sweep import plot_sweep
from headwater.foreign_names import HINTS, hint_for
from headwater.runs.result import Result
from tests.tiny import embedded


def test_what_is_said_of_other_names_exists(llama):
    text = " ".join(hint_for(place, name) for place, name in HINTS)
    for path in re.findall(r"\bhw\.(\w+(?:\.[a-z]\w*|\.[A-Z]\w*)*)", text):
        found = hw
        for part in path.split("."):
            found = getattr(found, part)
    for part in re.findall(r"\bmodel\.(\w+)", text):
        assert hasattr(llama, part)
    for part in re.findall(r"\bresult\.(\w+)", text):
        assert hasattr(Result, part) or any(part in inspect.get_annotations(one) for one in Result.__mro__)


def test_none_of_them_is_a_name_or_an_option_of_headwater():
    takers = [hw.HookedModel.generate, hw.HookedModel.run, hw.HookedModel.cache, hw.load]
    functions = {"option": takers, "plot": [hw.Sweep.plot, plot_sweep]}
    owners = {"package": hw, "model": hw.HookedModel, "result": Result, "Cache": hw.Cache, "Circuit": hw.Circuit}
    for place, name in HINTS:
        if place in functions:
            assert not any(name in inspect.signature(one).parameters for one in functions[place])
        else:
            assert name not in dir(owners[place])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HookedTransformer", r"hw\.load\(name\) loads a model"),
        ("run_with_cache", r"model = hw\.load\(name\), then model\.run_with_cache"),
        ("logit_diff", "Did you mean 'logit_difference'"),
    ],
)
def test_the_package_says_what_to_use(name, said):
    assert not hasattr(hw, name)
    with pytest.raises(AttributeError, match=f"module 'headwater' has no attribute '{name}'.*{said}"):
        getattr(hw, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'headwater'.*{said}"):
        exec(f"from headwater import {name}")


def test_a_room_says_what_it_does_not_offer_to_an_import_too():
    with pytest.raises(ImportError, match=r"from 'headwater\.heads'.*Did you mean 'ablate_heads'"):
        from headwater.heads import ablate_head  # type: ignore[attr-defined]  # noqa: F401
    from headwater.heads import ablate_heads, scores  # noqa: F401  # a name that it offers, and a module


def test_a_result_says_where_its_rows_and_tensors_are():
    model, quiet = embedded(), {"progress": False}
    sweep = hw.patch(model, " the cat", sites="z", layers=[0], values="zero", metric=hw.probability(" a"), **quiet)
    cache = model.cache(" the cat", sites="z", layers=[0], **quiet)
    for result, name, said in (
        (sweep, "df", r"This Sweep has no 'df': its rows are a pandas table, result\.table\."),
        (sweep, "to_csv", r"This Sweep has no 'to_csv': its table has it, result\.table\.to_csv\."),
        (sweep, "savefig", r"result\.plot\(\)\.savefig\(path\) writes it"),
        (sweep, "tabel", r"This Sweep has no 'tabel'\. Did you mean 'table'"),
        (sweep, "nonsense", r"This Sweep has no 'nonsense'; dir\(\) of it lists its names\."),
        (cache, "items", r"This Cache has no 'items': cache\['resid_post', 3\] is a tensor"),
    ):
        assert not hasattr(result, name)
        with pytest.raises(AttributeError, match=said):
            getattr(result, name)
    assert copy.deepcopy(sweep).report() == sweep.report()
    with pytest.raises(InputError, match=r"several tensors: take one, as cache\['resid_post', 3\]"):
        np.asarray(cache)
    with pytest.raises(InputError, match="no option names_filter="):
        model.cache(" the cat", names_filter=None)


def test_a_result_is_read_as_its_table_and_its_axes_write_their_figure(tmp_path):
    model = embedded()
    asked = {"sites": "z", "layers": [0], "values": "zero", "metric": hw.probability(" a"), "progress": False}
    sweep = hw.patch(model, " the cat", **asked)
    assert sweep["head"].equals(sweep.table["head"])
    assert len(sweep) == len(sweep.table) == model.shape.n_heads
    assert [row.head for row in sweep] == sweep.table["head"].tolist()
    for asked_for, said in (("heads", r"no column 'heads'\. Did you mean 'head'"), (0, "no column 0.*iloc")):
        with pytest.raises(InputError, match=said):
            sweep[asked_for]
    ax = sweep.plot()
    ax.savefig(tmp_path / "heads.pdf")
    assert (tmp_path / "heads.pdf").read_bytes().startswith(b"%PDF")
    assert sweep.plot(ax) is ax
    with pytest.raises(
        InputError, match=r"a folder, not a file such as .*result\.save\('heads'\) is read back by Sweep"
    ):
        sweep.save(tmp_path / "heads.csv")
    with pytest.raises(InputError, match="save: missing a required argument: 'folder'; its arguments are folder"):
        sweep.save()


def test_an_argument_that_is_missing_or_too_much_is_named_with_what_it_is(llama):
    for call, said in (
        (lambda: hw.patch(llama, " cat", " dog", sites="z"), "patch: missing a required argument: 'metric'"),
        (lambda: hw.compare_heads(llama, llama), "compare_heads: too many positional arguments; its arguments are mod"),
        (lambda: llama.cache(" cat", "pattern"), "cache: too many positional arguments"),
        (lambda: llama(input_ids=[[1]]), "model has no option input_ids=: the first argument is texts, or token ids"),
    ):
        with pytest.raises(InputError, match=said):
            call()


def test_an_option_of_elsewhere_says_what_to_use(llama):
    with pytest.raises(
        InputError, match=r"generate has no option verbose=: functions that show a bar take progress=False\."
    ):
        llama.generate(" cat", verbose=False)
    with pytest.raises(InputError, match=r"generate has no option temprature=\. Did you mean 'temperature'"):
        llama.generate(" cat", temprature=1)
    with pytest.raises(InputError, match=r"load has no option torch_dtype=: hw\.load takes dtype=\."):
        hw.load(torch_dtype="float32")


def test_a_run_refuses_what_is_not_its_option_and_says_what_was_meant(llama):
    for option, way in (
        ({"fwd_hooks": []}, r"hooks are pairs"),
        ({"hook": []}, r"Did you mean 'hooks'"),
        ({"prepend_bos": False}, r"hw\.load\(\.\.\., bos=\)"),
        ({"return_type": "loss"}, r"model\.run returns logits"),
        ({"stop_at_layer": 1}, r"stop_at=layer"),
        ({"past_kv_cache": None}, r"past_key_values="),
        ({"batchsize": 2}, r"Valid: .*hooks"),
    ):
        with pytest.raises(InputError, match=f"run has no option {next(iter(option))}=.*{way}"):
            llama.run(" cat", **option)


def test_a_function_that_takes_any_option_hands_it_to_one_that_does_not():
    """The others have signatures: what is not in them is refused (`headwater.calls`)."""
    public = {name: getattr(hw, name) for name in dir(hw) if not name.startswith("_")}
    classes = {name: kind for name, kind in public.items() if inspect.isclass(kind)}
    members = {f"{name}.{part}": getattr(kind, part) for name, kind in classes.items() for part in public_parts(kind)}
    functions = {name: one for name, one in (public | members).items() if inspect.isroutine(one)}
    # Claim.of is called by sweeps and curves, whose own options are checked.
    takes_any = {name.split(".")[-1] for name, one in functions.items() if takes_any_option(one)} - {"of"}
    assert takes_any == {"view", "save_html", "plot", "grid"}
    sweep = hw.patch(
        embedded(), " the cat", " the dog", sites="resid_pre", layers=[0], metric=hw.probability(" a"), progress=False
    )
    for name in takes_any:
        with pytest.raises(InputError, match="nonsense="):
            getattr(sweep, name)(**({"path": "x.html"} if name == "save_html" else {}), nonsense=1)


def public_parts(kind):
    """The names of a class's own public functions."""
    return [name for name in dir(kind) if not name.startswith("_")]


def takes_any_option(function):
    """Whether a function has `**options`."""
    try:
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    except (TypeError, ValueError):
        return False
    return function.__module__.startswith("headwater") and any(one.kind is one.VAR_KEYWORD for one in parameters)


def results_below(kind):
    for below in kind.__subclasses__():
        yield below
        yield from results_below(below)


def public_calls():
    """Every function that a room offers, and every public method of models, circuits and results that takes options."""
    rooms = [room.name for room in pkgutil.iter_modules(hw.__path__, "headwater.") if room.ispkg]
    for room in map(importlib.import_module, ["headwater", *rooms]):
        for name in getattr(room, "__all__", ()):
            if inspect.isfunction(one := getattr(room, name)):
                yield f"{room.__name__}.{name}", one
    classes = [*hw.HookedModel.__mro__, hw.Circuit, *results_below(Result)]
    for kind in (kind for kind in classes if kind.__module__.startswith("headwater.")):
        for name, member in vars(kind).items():
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, classmethod)):
                yield f"{kind.__name__}.{name}", getattr(kind, name)


def test_every_public_function_says_of_an_option_that_it_does_not_have_which_was_meant():
    refused = 0
    for name, call in public_calls():
        if not takes_any_option(call):
            with pytest.raises(InputError, match=rf"^{name.split('.')[-1]} has no option no_such_option=\."):
                call(no_such_option=1)
            refused += 1
    assert refused > 150
    model, asked = embedded(), {"sites": "z", "metric": hw.probability(" a"), "progress": False}
    with pytest.raises(InputError, match=r"patch has no option layer=\. Did you mean 'layers'"):
        hw.patch(model, " the cat", " the dog", layer=[0], **asked)
    with pytest.raises(InputError, match=r"cache has no option head=\. Did you mean 'heads'"):
        model.cache(" the cat", head=[0])
