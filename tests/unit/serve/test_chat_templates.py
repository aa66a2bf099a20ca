"""Chat templates: what they can use, and their bounds of time and memory."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from tests.unit.gguf_files import byte_level

from smolcluster.errors import UserError
from smolcluster.serve.text import chat_template, rendering
from smolcluster.serve.text.chat_template import TemplateFailed, check_template, render
from smolcluster.serve.text.conversation import ChatTokenizer
from smolcluster.serve.text.rendering import render_in_child
from smolcluster.serve.text.vocabulary import gguf_vocabulary

pytest.importorskip("tokenizers", reason="pip install 'smolcluster[serve]'")
pytest.importorskip("jinja2", reason="pip install 'smolcluster[serve]'")


def test_templates_see_contents_as_they_are() -> None:
    template = (
        "{% for m in messages %}{% if not m.content %}(nothing){% endif %}"
        "[{{ m.content | trim }}|{{ m['content'].strip() }}]{% endfor %}{{ bos_token }}{{ tools is none }}"
    )
    text = ChatTokenizer(
        gguf_vocabulary(byte_level(), where="test"), template=template, names={"bos_token": "<|endoftext|>"}
    )
    tokens = text.chat([{"role": "user", "content": "  a b \n"}, {"role": "user", "content": ""}])
    spelled = b"".join(text.token_bytes(token) for token in tokens).decode()
    assert spelled == "[a b|a b](nothing)[|]<|endoftext|>True"
    assert tokens.count(0) == 1


def test_what_transformers_offers_to_templates() -> None:
    template = (
        "{{ strftime_now('%Y') | length }}{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}said{% endgeneration %}{{ {'a': 'ü<'} | tojson }}\n"
        "    {% if true %}\nkept\n    {% endif %}\n"
    )
    assert render(template, [], names={}) == '4012said{"a": "ü<"}\nkept\n'


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'a' * 10 ** 12 }}", "too large"),
        ("{{ 10 ** 12 * 'a' }}", "too large"),
        ("{{ 9 ** 999999999 }}", "too large"),
        ("{% for a in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than"),
        ("{{ 'x' | center(9999999) }}", "writes more than"),
        ("{{ undefined.attribute }}", "'undefined' is undefined"),
        ("{{ 'x' | no_such_filter }}", "no_such_filter"),
    ],
)
def test_templates_are_bounded(source: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        render_in_child(source, [{"role": "user", "content": "x"}], names={})
    assert told in str(error.value)


MUCH = "{% for i in range(999) %}{{ 'x' * 3999999 }}{% endfor %}"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is measured, a moment later")
@pytest.mark.parametrize(
    "source",
    [
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999s' | format('x') }}",
        "{{ '{:{}}'.format('x', 9999999999) }}",
        "{{ '1'['zfill'](9999999999) }}",
        "{{ ('x' * 999999).replace('x', 'y' * 999999) }}",
        "{{ ('y' * 999999).join('x' * 999999) }}",
        "{{ ['x'] | batch(9999999999, 'x') | list }}",
        "{{ 1.5 | round(99999999, 'ceil') }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        f"{{% set x %}}{MUCH}{{% endset %}}",
        f"{{% macro m() %}}{MUCH}{{% endmacro %}}{{{{ m() }}}}",
        f"{{% filter upper %}}{MUCH}{{% endfilter %}}",
        "{{ [[1]] | tojson(indent=9999999999) }}",
        "{{ ('%' * 4000000) | urlencode }}",
    ],
)
def test_large_values_end_their_process_at_most(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_template(source)  # constants are not evaluated here
    with monkeypatch.context() as patch:
        patch.setattr(rendering, "RENDER_S", 3.0)
        with pytest.raises(TemplateFailed):
            render_in_child(source, [], names={})
    assert render_in_child("fine", [], names={}) == "fine"


def test_the_bounds_change_no_result() -> None:
    """What templates of models do, against Jinja itself."""
    sandbox = pytest.importorskip("jinja2.sandbox")
    source = (
        "{% macro turn(m, l) %}{{ '<|' ~ m.role ~ '|>' ~ l.index0 }} {{ m['content'] | trim }}{% endmacro %}"
        "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if m.content is string and '</think>' in m.content %}{% set ns.last = m.content.split('</think>')[-1] %}{% endif %}"
        "{{ turn(m, loop) }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ns.n ~ ns.last.lstrip('\\n') ~ none }}"
        "{% set text %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ text | upper | replace('U', 'u') }}"
        "{{ messages | map(attribute='role') | join('+') }}{{ '-'.join(messages | map(attribute='role')) }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a\\nb' | indent(4) }}"
        "{{ '%s: %d' % ('x', 5) }}"
        "{{ '{} of {:>3}'.format('1', 2) }}{{ '%02d' | format(7) }}{{ 'ab'.center(9) }}{{ [1, 2] | sum }}{{ 'x' * 3 }}"
        "{{ 3 ~ 4 * 2 }}{{ ['b', 'a'] | sort | join }}{{ 'A-B'.replace('-', '') }}"
        "{% filter upper %}quiet{% endfilter %}{{ messages | batch(1) | list | length }}{{ 'x' | default('y') }}"
    )
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "<think>?</think>\nyes"}]
    plain = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    found = render(source, messages, names={})
    assert found == plain.render(messages=messages)
    assert "<|assistant|>1" in found


LOOP = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


def test_a_template_that_loops_is_ended_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "x"}]
    with monkeypatch.context() as patch:
        patch.setattr(rendering, "RENDER_S", 0.2)
        with pytest.raises(TemplateFailed, match=r"takes longer than 0\.2 s"):
            render_in_child(LOOP, messages, names={})
    assert render_in_child("{{ messages[0].content }}", messages, names={}) == "x"


def test_a_conversation_is_rendered_in_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ChatTokenizer(gguf_vocabulary(byte_level(), where="test"), template="here")
    monkeypatch.setattr(rendering._POOL, "request", lambda one: {"text": one["source"].replace("here", "there")})
    assert text.chat([{"role": "user", "content": "x"}]) == text.encode("there")


def keeps_mb(megabytes: int) -> str:
    grows = "{% set ns.x = [ns.x, 'x' * 3999999] %}"
    return f"{{% set ns = namespace(x=[]) %}}{{% for a in range({megabytes // 4}) %}}{grows}{{% endfor %}}"


def test_a_template_that_wants_much_memory_is_ended_and_leaves_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps 1.6 GB, which takes it a second where there is no bound."""
    monkeypatch.setattr(rendering, "RENDER_S", 300.0)
    for name in "abc":
        if sys.platform == "linux":
            with pytest.raises(TemplateFailed):
                render_in_child(keeps_mb(1600) + name, [], names={})
        assert render_in_child("fine", [], names={}) == "fine"
        assert render_in_child(keeps_mb(800) + name, [], names={}) == name


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps; macOS always has it")
def test_where_the_system_does_not_bound_memory_the_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 300.0)
    monkeypatch.setattr(rendering, "MEASURED", True)
    monkeypatch.setattr(rendering, "MEMORY_BYTES", 128 << 20)  # of the parent: the child bounds itself at 1 GiB
    with pytest.raises(TemplateFailed, match="more than 128 MB"):
        render_in_child(keeps_mb(240) + LOOP, [], names={})
    assert render_in_child("fine", [], names={}) == "fine"


def test_the_process_of_templates_has_no_secrets_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOLCLUSTER_TOKEN", "a-secret-for-the-test")
    rendering._POOL.close()
    assert render_in_child("fine", [], names={}) == "fine"
    if sys.platform == "linux":
        (process,) = filter(None, rendering._POOL._idle.queue)
        found = Path(f"/proc/{process._process.pid}/environ").read_bytes()
        assert b"PATH=" in found
        assert b"a-secret-for-the-test" not in found


def test_an_old_jinja_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before 3.1.6 let a template out of the sandbox."""
    chat_template._environment.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.1.5")
    try:
        with pytest.raises(
            UserError, match=r"Jinja 3\.1\.5 lets .*; install a newer one with: pip install 'jinja2>=3.1.6'"
        ):
            check_template("x")
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.2.0rc1")
        check_template("x")
    finally:
        chat_template._environment.cache_clear()


def test_no_extra_installs_an_old_jinja() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [name for extra in project["optional-dependencies"].values() for name in extra if "jinja2" in name.lower()]
    assert wanted
    assert set(wanted) == {f"jinja2>={'.'.join(map(str, chat_template.OLDEST_JINJA))}"}


def test_an_invalid_template() -> None:
    with pytest.raises(UserError, match="chat template cannot be used: "):
        check_template("{% for %}")
