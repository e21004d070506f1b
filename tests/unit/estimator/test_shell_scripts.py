"""Scripts are read as bash runs them: the words of the launched commands are compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.estimator.stated.formats import read_stated_plan
from tessera.estimator.stated.shell.script import Launch, read_script
from tessera.estimator.stated.shell.variables import ShellWord
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


# A script is a list of statements with variables A to F, of which C is a list. ``@`` is a number.

names = st.sampled_from("ABDEF")
numbers = st.integers(0, 12).map(str)
plain = st.sampled_from(["--x", "1", "a b", "--tp 2", "-y", "8", "", " p  q ", "t=1", "é"])
BEFORE = ["A=1", "B='--x 2'", "C=(--l 'm n')", "D=", "E=abc", "F=8", "N=8"]
AFTER = 'python last.py $N $A "$B" --c=$D ${E} ${F:-1} ${C[@]}'


@st.composite
def plain_uses(draw: st.DrawFn) -> str:
    name = draw(names)
    return draw(
        st.sampled_from(
            [
                f"${name}",
                f"${{{name}}}",
                f"${{{name}:-d e}}",
                f"${{{name}-$A}}",
                "${C[@]}",
                "${C[*]}",
                f"$(({draw(numbers)} * N + {draw(numbers)} - ${{N}} / 2))",
            ]
        )
    )


@st.composite
def uses(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from("ABCDEF"))
    return draw(
        st.sampled_from(
            [
                draw(plain_uses()),
                f"${{{name}:+--set}}",
                f"${{{name}:=new}}",
                f'${{{name}[@]:+"${{{name}[@]}}"}}',
                f"${{{name}[0]}}",
                f"${{#{name}}}",
                f"${{{name}%b}}",
                f"${{{name}/a/z}}",
                f"${{{name}:0:2}}",
                f"$(({name}++ + 010))",
                f"$(echo {draw(numbers)} ${name})",
                f"`expr {draw(numbers)} + {draw(numbers)}`",
            ]
        )
    )


@st.composite
def words(draw: st.DrawFn, *, every_use: bool = True) -> str:
    kind = draw(st.integers(0, 6))
    use = draw(uses() if every_use else plain_uses())
    if kind == 0:
        return use
    if kind == 1:
        return f'"{use}"'
    if kind == 2:
        return f'"{draw(plain)}{use} {draw(plain)}"'
    if kind == 3:
        return f"'{draw(plain)}'"
    if kind == 4:
        return f"--k={use}"
    if kind == 5:
        odd = ["--m=*", "$'t\\n'", "a{1,2}", "~/x", "$[1+2]"] if every_use else []
        return draw(st.sampled_from(["--x", "1", "a\\ b", "x#y", "'a'\"b\"c", "\\$A", '""', *odd]))
    return f"{use}-{draw(numbers)}"


@st.composite
def plain_statements(draw: st.DrawFn, *, every_use: bool = False) -> str:
    """Draw a statement that is read as bash runs it, if its words are."""
    name = draw(names)
    word = draw(words(every_use=every_use))
    listed = " ".join(draw(st.lists(words(every_use=every_use), max_size=4)))
    return draw(
        st.sampled_from(
            [
                f"{name}={word}",
                f"{name}+={word}",
                f'{name}="{draw(plain)} \\\n {draw(plain_uses())} {draw(plain)}"',
                f"export {name}={word} {draw(names)}=3 N=$((N * 2 + 1))",
                f"C=({listed})  # a comment ' with a quotation mark",
                f"C+=(\n  {listed} # --no\n)",
                f"python p@.py {listed}",
                f"torchrun --nproc_per_node=8 p@.py \\\n  {listed} 2>&1 | cat > log",
                f"OMP_NUM_THREADS=1 srun -l python -u p@.py {word} > out.txt",
                f"mkdir -p x && {name}_=1 python p@.py {word} # '",
                f'CMD="python p@.py {draw(plain_uses())}"; echo $CMD; $CMD',
                f"cat > x.json <<EOF\n${name} \\$A don't\nEOF\npython p@.py",
                f"cat <<-'E F' && python p@.py\n\tif ${name}\n\tE F",
            ]
        )
    )


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
                f"[[ x{number} =~ ^(a|x)[0-9]$ ]]",
                f"(( {number} > 4 ))",
                f"(( {draw(names)} += {number} ))",
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
        draw(plain_statements(every_use=True)),
        f"{name}=$(( {draw(numbers)} > 3 ? 7 : {draw(numbers)} % 5 ))",
        f"{name}[1]={word}",
        f'bash -c "python p@.py {name} ${name} {draw(plain)}"',
        f"export {name}; bash -c 'python p@.py ${name}'",
        f'CMD="python p@.py {draw(uses())}"; echo $CMD; eval $CMD',
        f"eval '{name}=2'",
        f"let {name}=2+{draw(numbers)}",
        f"read -r {name} <<< {draw(numbers)}",
        f"unset {name}",
        f"declare -r {name}={word}",
        f"printf -v {name} %s new",
        f"{name}=1 | cat",
        f"{name}=2 &",
        f"IFS=b; python p@.py {listed}; IFS=' '",
        f'f() {{ local {name}=1; python p@.py "$@" $# ${name} ${{1:-none}}; }}; f {listed}',
        f"g() {{ {name}=5; }}; g",
        f'set -- {listed}; python p@.py $1 "$2"; shift; python p@.py "$@" ${{1:-none}}',
        f"( {name}=7; python p@.py ${name} )",
        f"for {name} in {listed}; do :; done",
        f"({name}=3); ((F = 3)); python p@.py $F",
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
                f"{condition} && {name}=6 || {name}=7",
                f"for {name} in {listed}; do\n{body}\ndone",
                f"case {word} in\n 1|a*) {body}\n;;\n --x) {other}\n;;\n *) {name}=other ;;\nesac",
                f"i=0; while [ $i -lt 3 ]; do i=$((i+1)); [ $i -eq 2 ] && continue\n{body}\ndone",
                f"h() {{\n{body}\n}}; {other}\nh",
            ]
        )
    )


def numbered(lines: list[str]) -> str:
    """Return a script in which each program has its own name."""
    script = "\n".join([*BEFORE, *lines, AFTER])
    count = iter(range(script.count("@.py")))
    return re.sub("@[.]py", lambda _: f"{next(count)}.py", script)


@examples(150)
@given(lines=st.lists(plain_statements(), min_size=1, max_size=8))
def test_the_words_of_a_plain_script_are_those_of_bash(bash: Bash, lines: list[str]) -> None:
    script = numbered(lines)
    ours = [words_of(launch) for launch in read_script("file", script).launches]
    assert ours == [words[1:] for words in bash.started(script)], script


@examples(150)
@given(lines=st.lists(statements(), min_size=1, max_size=8))
def test_any_script_is_refused_or_its_known_words_are_those_of_bash(
    bash: Bash, lines: list[str]
) -> None:
    script = numbered(lines)
    try:
        launches = read_script("file", script).launches
    except InvalidInput:
        return
    started = bash.started(script)
    for launch in launches:
        for words in started:
            if launch.program in words:
                check_covered(launch, words[1:], script)


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


def check_covered(launch: Launch, words: list[str], script: str = "") -> None:
    """Check that a launch has the words that bash starts, where it knows them."""
    ours = [*launch.options, launch.program, *launch.words]
    pattern = ""
    for word in ours:
        if isinstance(word, ShellWord) and word.lone:
            pattern += "(?:[^\0]*\0)*"
        elif isinstance(word, ShellWord) and word.unknown:
            pattern += "[^\0]*\0(?:[^\0]*\0)*"
        else:
            pattern += re.escape(str(word)) + "\0"
    assert re.fullmatch(pattern, "".join(f"{word}\0" for word in words)), (ours, words, script)


UNKNOWN = {
    "arguments-in-a-loop": {"tp", "micro_batch"},
    "case-of-precision": {"precision", "recomputation"},
    "choice-by-size": {"tp", "pp", "sp", "blocks"},
    "defaults-of-the-environment": {"gpus"},
}
"""Fields that a run of a script decides, since a condition sets their variables."""
NOT_FOLLOWED = {
    "eval-with-a-log": "eval (line 10)",
    "function": "the function launch (line 2)",
    "large-run": "the text of a command (line 31)",
    "srun-and-a-shell": "the text of a command (line 10)",
    "switches": "eval (line 46)",
    "twice-the-same-plan": "`for` (line 2)",
}
"""Scripts that start their training where commands are not followed."""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_of_a_public_style_is_read_as_bash_runs_it(bash: Bash, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.stem in NOT_FOLLOWED:
        place = re.escape(NOT_FOLLOWED[path.stem])
        with pytest.raises(
            InvalidInput, match=f"training inside {place}, .* give the command line"
        ):
            read_stated_plan(path.name, text)
        return
    launches = read_script(path.name, text).launches
    started = bash.started(text, HOME="/root")
    assert len(launches) == len(started) > 0
    for launch, words in zip(launches, started, strict=True):
        check_covered(launch, words[1:])
    stated = read_stated_plan(path.name, text)
    assert isinstance(stated, StatedPlan)
    assert {*stated.unknown} == UNKNOWN.get(path.stem, set())
    assert {name: getattr(stated, name) for name in PLAN_NAMES} == {
        name: None if name in stated.unknown else value
        for name, value in (dict.fromkeys(PLAN_NAMES) | plan_of(started[-1])).items()
    }


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
                f'if [ -e {use} ]; then ARGS="$ARGS --global-batch-size {degree}"; fi',
                f"ls {use} && OLD=$ARGS; ARGS=$OLD",
                f"g() {{ ARGS='--context-parallel-size {degree}'; }}; ls {use} || g",
                f': ${{NEW:=--pipeline-model-parallel-size {degree}}}; ARGS="$ARGS $NEW"',
                f"read ARGS <<< '--tensor-model-parallel-size {degree}'",
                f"set -- --micro-batch-size {degree}; ARGS=$@",
                "eval ARGS=",
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
        if field not in stated.unknown:
            assert (ours and str(ours)) == values.get(names[0]), (script, words)
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
        'A=(--a --b c); torchrun t.py "${A[@]:1}" ${A[@]:0:2} "${A[*]:1}" "${A[@]:9}"',
        "declare -A M; M[a]=1; M[b]=2; torchrun t.py ${M[a]}",
        "declare -A M; M=([a]=1 [b]=2); torchrun t.py ${M[a]}",
        "A=(a b c); unset 'A[1]'; torchrun t.py ${A[@]}",
        "i=5; while ((i-- > 3)); do :; done; torchrun t.py $i",
        "i=0; until ((++i > 3)); do :; done; torchrun t.py $i",
        "N=0; for i in {1..4}; do N=$((N+1)); done; torchrun t.py $N",
        "torchrun t.py --a {1,2} {a..c}",
        "A=(a b); A=c; torchrun t.py ${A[@]}; B=x; B+=(y); torchrun t.py ${B[@]}",
        "SECONDS=5; OPTIONS=--a; sleep 1; torchrun t.py $SECONDS $OPTIONS",
        "A=1; export A=2 B=$A; torchrun t.py $A $B",
        "A=abc; IFS=b; torchrun t.py $A",
        "A=; [[ ${A:=2} ]]; torchrun t.py $A",
        "A=~/x; torchrun t.py $A",
        "A=([5]=x [0]=y c); torchrun t.py ${A[@]}",
        "f() { eval A=5; }; A=1; f; torchrun t.py $A",
        "local_() { local -n R=$1; R=5; }; A=1; local_ A; torchrun t.py $A",
    ],
)
def test_no_word_that_bash_makes_in_an_odd_way_is_guessed(bash: Bash, script: str) -> None:
    launches, started = read_script("file", script).launches, bash.started(script)
    for launch, words in zip(launches, started, strict=True):
        check_covered(launch, words[1:])
