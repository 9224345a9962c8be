"""Names and options of other libraries: what is said of them exists, and none of them is one of headwater's."""

import inspect
import re

import pytest

import headwater as hw
from headwater import elsewhere
from headwater.errors import InputError
from headwater.models import other_options, transformer_lens_ways
from headwater.runs.result import Result

SAID = [
    *elsewhere.WAYS.items(),
    *transformer_lens_ways.WAYS.items(),
    *other_options.GENERATE.items(),
    *other_options.LOAD.items(),
]


@pytest.mark.parametrize(("name", "said"), SAID, ids=[f"{name}-{number}" for number, (name, _) in enumerate(SAID)])
def test_what_is_said_of_other_names_exists(name, said, llama):
    text = said.format(name=name)
    for path in re.findall(r"\bhw\.(\w+(?:\.[a-z]\w*|\.[A-Z]\w*)*)", text):
        found = hw
        for part in path.split("."):
            found = getattr(found, part)
    for part in re.findall(r"\bmodel\.(\w+)", text):
        assert hasattr(llama, part)
    for part in re.findall(r"\bresult\.(\w+)", text):
        assert hasattr(Result, part)


def test_none_of_them_is_a_name_or_an_option_of_headwater():
    assert not {name for name in elsewhere.WAYS if name in dir(hw)}
    assert not set(other_options.GENERATE) & set(inspect.signature(hw.HookedModel.generate).parameters)
    assert not set(other_options.LOAD) & set(inspect.signature(hw.load).parameters)


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


def test_the_class_of_models_says_what_to_use():
    assert not hasattr(hw.HookedModel, "from_pretrained")
    with pytest.raises(AttributeError, match=r"HookedModel has no 'from_pretrained': hw\.load\(name\)\."):
        _ = hw.HookedModel.from_pretrained
    with pytest.raises(AttributeError, match=r"HookedModel has no 'genrate'\. Did you mean 'generate'"):
        _ = hw.HookedModel.genrate
    with pytest.raises(AttributeError, match="type object 'HookedModel' has no attribute '__array__'"):
        _ = hw.HookedModel.__array__


def test_an_option_of_elsewhere_says_what_to_use(llama):
    with pytest.raises(InputError, match=r"generate has no option verbose=: progress=False shows no bar\."):
        llama.generate(" cat", verbose=False)
    with pytest.raises(InputError, match=r"generate has no option temprature=\. Did you mean 'temperature'"):
        llama.generate(" cat", temprature=1)
    with pytest.raises(InputError, match=r"load has no option torch_dtype=: it is called dtype=\."):
        hw.load(torch_dtype="float32")


def test_a_run_refuses_what_is_not_its_option_and_says_what_was_meant(llama):
    for option, way in (
        ({"fwd_hooks": []}, r"the second argument is hooks"),
        ({"hook": []}, r"Did you mean 'hooks'"),
        ({"prepend_bos": False}, r"hw\.load\(\.\.\., bos=\)"),
        ({"return_type": "loss"}, r"logits come back"),
        ({"stop_at_layer": 1}, r"it is called stop_at="),
        ({"cache": None}, r"past_key_values="),
        ({"batchsize": 2}, r"Valid: .*hooks"),
    ):
        with pytest.raises(InputError, match=f"run has no option {next(iter(option))}=.*{way}"):
            llama.run(" cat", **option)


def test_a_function_that_takes_any_option_hands_it_to_one_that_does_not():
    """The others have signatures: Python refuses what is not in them."""
    public = {name: getattr(hw, name) for name in dir(hw) if not name.startswith("_")}
    classes = {name: kind for name, kind in public.items() if inspect.isclass(kind)}
    members = {f"{name}.{part}": getattr(kind, part) for name, kind in classes.items() for part in public_parts(kind)}
    functions = {name: one for name, one in (public | members).items() if inspect.isroutine(one)}
    takes_any = {name.split(".")[-1] for name, one in functions.items() if takes_any_option(one)}
    assert takes_any == {"view", "save_html", "plot", "grid"}
    sweep = hw.patch(
        hw.load(), " the cat", " the dog", sites="resid_pre", layers=[0], metric=hw.probability(" a"), progress=False
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
