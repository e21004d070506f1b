"""Scripts are read as bash runs them: the words of the launched commands are compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.stated.formats import read_stated_plan
from tessera.estimator.stated.shell.commands import Launch
from tessera.estimator.stated.shell.script import read_script
from tessera.estimator.stated.shell.values import ShellWord
from tessera.estimator.stated.statement import StatedPlan
from tessera.formulation.errors import InvalidInput
from tests.support.bash import Bash
from tests.support.laws import examples

SCRIPTS = sorted((Path(__file__).parents[2] / "support" / "scripts").glob("*.sh"))


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Bash:
    return Bash(tmp_path_factory.mktemp("bash"))


def words_of(launch: Launch) -> list[str]:
    """Return all words of a launch but the launcher's name, as a program gets them."""
    return [*map(str, launch.options), launch.program, *map(str, launch.words)]


# A script is a list of statements. Every draw is valid bash that uses variables A to F.

names = st.sampled_from("ABCDEF")
numbers = st.integers(0, 12).map(str)
plain = st.sampled_from(["--x", "1", "a b", "--tp 2", "-y", "8", "", " p  q ", "t=1", "é"])


@st.composite
def uses(draw: st.DrawFn) -> str:
    name = draw(names)
    return draw(
        st.sampled_from(
            [
                f"${name}",
                f"${{{name}}}",
                f"${{{name}:-d e}}",
                f"${{{name}-}}",
                f"${{{name}:+--set}}",
                f'${{{name}[@]:+"${{{name}[@]}}"}}',
                f"${{{name}[@]}}",
                f"${{{name}[*]}}",
                f"${{{name}[0]}}",
                f"${{#{name}}}",
                f"${{{name}%b}}",
                f"${{{name}##*-}}",
                f"${{{name}/a/z}}",
                f"${{{name}:0:2}}",
                f"${{{name}^^}}",
                f"$(({draw(numbers)} * (2 + {draw(numbers)})))",
                f"$(echo {draw(numbers)} ${name})",
                f"`expr {draw(numbers)} + {draw(numbers)}`",
            ]
        )
    )


@st.composite
def words(draw: st.DrawFn) -> str:
    kind = draw(st.integers(0, 6))
    if kind == 0:
        return draw(uses())
    if kind == 1:
        return f'"{draw(uses())}"'
    if kind == 2:
        return f'"{draw(plain)}{draw(uses())} {draw(plain)}"'
    if kind == 3:
        return f"'{draw(plain)}'"
    if kind == 4:
        return f"--k={draw(uses())}"
    if kind == 5:
        return draw(
            st.sampled_from(["--x", "1", "a\\ b", "x#y", "'a'\"b\"c", "\\$A", "$'t\\n'", "--m=*"])
        )
    return f"{draw(uses())}-{draw(numbers)}"


@st.composite
def conditions(draw: st.DrawFn) -> str:
    use, number = draw(uses()), draw(numbers)
    return draw(
        st.sampled_from(
            [
                f'[ -z "{use}" ]',
                f"[ -n {draw(names)} ]",
                f'[ "{use}" = 1 ] || [ {number} -gt 3 ]',
                f"[[ {use} == *a* && {number} -le 5 ]]",
                f'[[ ! ( "{use}" != "8" ) ]]',
                f"(( {number} > 4 ))",
                f'! [ "{use}" == "--x" -o {number} -lt 2 ]',
                "true",
                "false",
            ]
        )
    )


@st.composite
def statements(draw: st.DrawFn, depth: int = 2) -> str:
    name = draw(names)
    word = draw(words())
    listed = " ".join(draw(st.lists(words(), max_size=4)))
    simple = [
        f"{name}={word}",
        f"{name}+={word}",
        f'{name}="{draw(plain)} \\\n {draw(uses())} {draw(plain)}"',
        f"export {name}={word} {draw(names)}=3",
        f"{name}=({listed})  # a comment ' with a quotation mark",
        f"{name}+=(\n  {listed} # --no\n)",
        f"{name}=$(( {draw(numbers)} > 3 ? 7 : {draw(numbers)} % 5 ))",
        f"python a.py {listed}",
        f"torchrun --nproc_per_node=8 b.py \\\n  {listed} 2>&1 | cat > log",
        f"OMP_NUM_THREADS=1 srun -l python -u c.py {word} > out.txt",
        f'bash -c "python d.py {name} ${name} {draw(plain)}"',
        f"bash -c 'python e.py ${name}'",
        f'CMD="python f.py {draw(uses())}"; echo $CMD; $CMD; eval $CMD',
        f"cat > x.json <<EOF\n${name} \\$A\nEOF",
        f'f() {{ local {name}=1; python g.py "$@" $# ${name} ${{1:-none}}; }}; f {listed}',
        f'set -- {listed}; python h.py $1 "$2"; shift; python i.py "$@"',
        f"( {name}=7; python j.py ${name} )",
    ]
    if depth == 0:
        return draw(st.sampled_from(simple))
    body = "\n".join(draw(st.lists(statements(depth - 1), min_size=1, max_size=2)))
    other = draw(statements(depth - 1))
    condition = draw(conditions())
    return draw(
        st.sampled_from(
            [
                *simple,
                f"if {condition}; then\n{body}\nelse\n{other}\nfi",
                f"if {condition}; then\n{body}\nelif {draw(conditions())}\nthen {other}\nfi",
                f"{condition} && {{ {body}\n}}",
                f"for {name} in {listed}; do\n{body}\ndone",
                f"case {word} in\n 1|a*) {body}\n;;\n --x) {other}\n;;\n *) {name}=other ;;\nesac",
                f"i=0; while [ $i -lt 3 ]; do i=$((i+1)); [ $i -eq 2 ] && continue\n{body}\ndone",
            ]
        )
    )


@pytest.mark.full
@examples(150)
@given(lines=st.lists(statements(), min_size=1, max_size=8))
def test_the_words_of_a_drawn_script_are_those_of_bash(bash: Bash, lines: list[str]) -> None:
    script = "\n".join(["A=1", "B='--x 2'", "C=(--l 'm n')", "D=", "E=abc", "F=8", *lines])
    ours = [words_of(launch) for launch in read_script("file", script).launches]
    assert ours == [words[1:] for words in bash.started(script)], script


def values_of(words: list[str]) -> dict[str, str]:
    """Return the last value of each argument, read in the plainest way."""
    values = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.replace("_", "-").partition("=")
            values[name] = value if equals else following
    return values


PLAN_NAMES = {
    "tp": ("--tensor-model-parallel-size", "--model-parallel-size"),
    "pp": ("--pipeline-model-parallel-size",),
    "cp": ("--context-parallel-size",),
    "ep": ("--expert-model-parallel-size",),
    "micro_batch": ("--micro-batch-size", "--batch-size"),
    "global_batch": ("--global-batch-size",),
    "blocks": ("--num-layers",),
}


def plan_of(words: list[str]) -> dict[str, int]:
    """Return what the words of a training state about its plan."""
    values = values_of(words)
    return {
        field: int(values[name])
        for field, names in PLAN_NAMES.items()
        for name in names
        if name in values
    }


def check_covered(launch: Launch, words: list[str]) -> None:
    """Check that a launch has the words that bash starts, where it knows them."""
    ours = [*launch.options, launch.program, *launch.words]
    pattern = ""
    for word in ours:
        if isinstance(word, ShellWord) and word.lone:
            pattern += "(?:[^\0]*\0)*"
        elif isinstance(word, ShellWord) and word.unknown:
            pattern += "[^\0]*\0"
        else:
            pattern += re.escape(str(word)) + "\0"
    assert re.fullmatch(pattern, "".join(f"{word}\0" for word in words)), (ours, words)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_of_a_public_style_is_read_as_bash_runs_it(bash: Bash, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    launches = read_script(path.name, text).launches
    started = bash.started(text, HOME="/root")
    assert len(launches) == len(started) > 0
    for launch, words in zip(launches, started, strict=True):
        check_covered(launch, words[1:])
    stated = read_stated_plan(path.name, text)
    assert isinstance(stated, StatedPlan)
    assert not {*stated.unknown} - {"gpus"}
    expected = plan_of(started[-1])
    assert {
        name: getattr(stated, name) for name in PLAN_NAMES if getattr(stated, name) is not None
    } == expected


# What only a run decides: scripts whose environment differs from run to run.

outside = st.sampled_from(["X", "Y"])
degrees = st.sampled_from(["1", "2", "4", "8"])


@st.composite
def uncertain(draw: st.DrawFn) -> str:
    name, use, degree = draw(st.sampled_from(["T", "P", "M", "ARGS"])), draw(outside), draw(degrees)
    value = f"--micro-batch-size {degree}" if name == "ARGS" else degree
    return draw(
        st.sampled_from(
            [
                f"{name}={value!r}",
                f'{name}="${{{use}:-{value}}}"',
                f"{name}=${use}",
                f"{name}=${{{use}:+{value}}}",
                f"if [ -e {use}.txt ]; then {name}={value!r}; fi",
                f"if grep -q a /nowhere; then {name}={value!r}; else {name}=1; fi",
                f'if [ "${use}" = "4" ]; then {name}={value!r}; fi',
                f'A=${use}; if [ "$A" = 4 ]; then {name}={value!r}; else B=1; fi',
                f"[[ -n ${use} ]] && {name}={value!r}",
                f"case ${use} in 4) {name}={value!r};; esac",
                f"{name}=$(cat /nowhere || echo {degree})",
                f"for i in ${use}; do {name}=$i; done",
                f"for i in ${use} $(ls /nowhere); do {name}={value!r}; done",
                f"ls {use} || {name}={value!r}",
                'ARGS="$ARGS --sequence-parallel"',
                f"ARGS+=' --pipeline-model-parallel-size {degree}'",
                f"while [ -z ${use} ]; do {name}={value!r}; break; done",
                f'f() {{ A=${use}; if [ "$A" = 4 ]; then return; fi; {name}={value!r}; }}; f',
                f"for i in 1 2; do if [ -e /{use}no ]; then continue; fi; {name}={value!r}; done",
                f'for i in 1 2; do A=${use}; [ "$A" = 4 ] && break; {name}={value!r}; done',
                f"for i in ${use} $(echo a; echo b); do {name}=$T; T=$P; P=$M; done",
                f"A=${use}; case $A in 4) {name}={value!r};; *) {name}=1;; esac",
            ]
        )
    )


@examples(100)
@given(
    lines=st.lists(uncertain(), max_size=6),
    variables=st.dictionaries(outside, st.sampled_from(["", "1", "4", "--bf16"])),
)
def test_nothing_that_a_run_decides_is_guessed(
    bash: Bash, lines: list[str], variables: dict[str, str]
) -> None:
    command = "torchrun --nproc_per_node 8 --nnodes 1 train.py --context-parallel-size 1"
    degrees = "--tensor-model-parallel-size $T --pipeline-model-parallel-size=$P"
    arguments = f"{degrees} $ARGS --micro-batch-size $M"
    script = "\n".join(["T=2", "P=2", "M=2", "ARGS=", *lines, f"{command} {arguments}"])
    try:
        stated = read_stated_plan("file", script)
    except InvalidInput:
        return
    assert isinstance(stated, StatedPlan)
    taken = " ".join(note for note in stated.notes if note.startswith("taken as not set"))
    if any(f" {name}" in taken for name in variables):
        return  # the user is told what was assumed
    (words,) = bash.started(script, **variables)
    values = values_of(words)
    for field, names in PLAN_NAMES.items():
        ours = getattr(stated, field)
        if ours is not None:
            assert str(ours) == values[names[0]], (script, words)
    if "sp" not in stated.unknown and (stated.tp or 1) > 1:
        assert bool(stated.sp) == ("--sequence-parallel" in words), (script, words)


def test_the_case_of_quoted_arguments_is_read_whole() -> None:
    path = Path(__file__).parents[4] / "shared" / "data" / "cases" / "quoted-arguments.sh"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    stated = read_stated_plan(path.name, path.read_text(encoding="utf-8"))
    assert isinstance(stated, StatedPlan)
    assert (stated.tp, stated.pp, stated.micro_batch, stated.global_batch) == (2, 2, 4, 256)
    assert (stated.gpus, stated.blocks) == (16, 24)


@pytest.mark.parametrize(
    "script",
    [
        'f() { torchrun t.py "${@:2}" ${*:1:1} "${*:2}"; }; f 8 --tp 2',
        'A=(--a --b c); torchrun t.py "${A[@]:1}" ${A[@]:0:2} "${A[*]:1}" "${A[@]:9}"',
        "declare -A M; M[a]=1; M[b]=2; torchrun t.py ${M[a]}",
        "declare -A M; M=([a]=1 [b]=2); torchrun t.py ${M[a]}",
        "A=([1]=b [0]=a); torchrun t.py ${A[@]}",
        "A=(a b c); unset 'A[1]'; torchrun t.py ${A[@]}",
        "i=5; while ((i-- > 3)); do :; done; torchrun t.py $i",
        "i=0; until ((++i > 3)); do :; done; torchrun t.py $i",
        "N=0; for i in {1..4}; do N=$((N+1)); done; torchrun t.py $N",
        "torchrun t.py --a {1,2} {a..c}",
        "[[ abc =~ a\\.c ]] && A=1; [[ a.c =~ a\\.c ]] && B=1; torchrun t.py ${A:-0} ${B:-0}",
        '[[ abc =~ "a.c" ]] && A=1; [[ abc =~ ^a.c$ ]] && B=1; torchrun t.py ${A:-0} ${B:-0}',
    ],
)
def test_no_word_of_lists_maps_loops_and_braces_is_guessed(bash: Bash, script: str) -> None:
    (launch,), (words,) = read_script("file", script).launches, bash.started(script)
    check_covered(launch, words[1:])
