"""The words that say too little as a name, and better names.

A word is *lone* if it is the whole name, apart from underscores and digits around it. The names
that a protocol of the standard library, NumPy or pytest dictates are exempt.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

IRREGULAR: Final = (
    "begun born bought bound broken brought built caught chosen done drawn driven eaten fallen fed"
    " felt forgotten found given gone grown heard held kept known laid led left lent lost made meant"
    " met paid proven put read sent seen shown sold sought spent spoken stolen stuck sworn taken"
    " taught told thrown torn understood undone won worn woken written"
)
"""Participles that do not end in -ed."""

NOUNS_IN_ED: Final = (
    "bed bleed bound breed deed embed exceed greed heed hundred indeed proceed red reed shed sled"
    " succeed weed wed"
)
"""Words that end in -ed, or are listed above, and are nouns or verbs as well."""

VERBS: Final = frozenset({"put", "read"})
"""Participles that are imperatives, too, so that a function may have them as its name."""

CLASSES: Final = {
    "preposition": (
        "about above across after against along among around as at before behind below beneath beside"
        " between beyond by during for from in inside into near of off on onto out outside over past"
        " per since through till to toward towards under until up upon via with within without"
    ),
    "pronoun": (
        "another anybody anyone anything everybody everyone everything he hers his it its me mine my"
        " nobody nothing one ones other others our ours own same she somebody someone something such"
        " that their theirs them these they this those we what when where which who whom whose why"
        " you your yours"
    ),
    "adverb": (
        "again ahead alone already also always anew apart away back down early elsewhere else ever"
        " everywhere first here hence how instead last late later maybe meanwhile never next now"
        " nowhere often once only perhaps quite rather soon sooner still then thence there thus today"
        " together tomorrow too twice very yesterday yet"
    ),
    "quantifier": (
        "all any both each either enough every few fewer fewest least less many more most much neither"
        " none plenty rest several some whole"
    ),
}
"""The other classes of words that no name consists of."""

_RULE_OF_WORD: Final = {word: rule for rule, words in CLASSES.items() for word in words.split()}
_NOUNS: Final = frozenset(NOUNS_IN_ED.split())
_PARTICIPLE: Final = re.compile(
    rf"(?!.*(?:feed|need|seed|speed)$)[a-z]+ed|{'|'.join(IRREGULAR.split())}"
)
_EXTREME: Final = re.compile(
    r"(?:most|least|fewest)_(?!(?:common|likely|loaded|promising|recent|recently|squares|used)(?:_|$)).+"
)
_FRAGMENT: Final = re.compile(
    r"(?:.*_)?(?:that|which|whose)(?:_.+)?|(?:.+_)?while_wanted|require_(?:few|wanted)(?:_.+)?"
    r"|states_more|heed|looks?(?:_s)?|sees|hears|(?:left|said|told|heard|met)_s"
)
"""Clauses instead of nouns, and verbs of perception instead of what happens."""

PROTOCOL_METHODS: Final = {
    "closed": "of files and sockets",
    "done": "of futures",
    "cancelled": "of futures",
    "mean": "of arrays",
    "read": "of files",
}
"""Methods that a protocol of the standard library or of NumPy names."""

PROTOCOL_PARAMETERS: Final = {
    "out": "of NumPy's functions",
    "where": "of NumPy's functions",
    "other": "the second operand of a method",
}
WORDS_OF_TESTS: Final = {
    "expected": "the value that an assertion compares with",
    "captured": "the result of pytest's capsys",
}
TIME_TYPES: Final = frozenset({"datetime", "float"})
CLOCK_CALLS: Final = frozenset({"now", "time", "monotonic", "perf_counter", "process_time"})
"""A value of these is a time, which may be called ``now``."""

COUNTERPARTS: Final = {"left": "right", "first": "second", "up": "down", "down": "up"}
"""Words that are nouns of direction or order where the same scope has their counterpart."""

REFUSED_BY_GLOSSARY: Final = {
    "kind": ("gpu_type", re.compile(r"gpu_?types?", re.IGNORECASE)),
    "type": ("gpu_type", re.compile(r"gpu_?types?", re.IGNORECASE)),
    "policy": ("scheduler", re.compile(r"[A-Z]\w*Scheduler|Scheduler|schedulers")),
    "level": ("goal", re.compile(r"goals?", re.IGNORECASE)),
}
"""For each word that the glossary refuses: its term, and identifiers that show this meaning.

The word counts where the statement that binds it, or the type of a parameter, has such an
identifier.
"""

ADVICE: Final = {
    "participle": "add the noun, or name the thing itself",
    "preposition": "name the thing that it relates: an index, a time, a source, a target",
    "pronoun": "name the thing itself, e.g. job, node, row",
    "adverb": "add the noun: first_row, current_gangs, next_round",
    "quantifier": "say of what: max_, min_, all_jobs, remaining_nodes",
    "fragment": "use a noun or a verb with its object, e.g. fitting_patterns, check_limit",
    "class_home": "qualify one of both",
    "glossary": "use the word of docs/glossary.md",
    "those_of": "repeat the noun",
    "that_of": "repeat the noun",
    "what_is": "use a noun instead of a clause",
    "final_too": 'say "also" earlier in the sentence, or leave it out',
}
"""The advice for each rule. The keys are all rules."""

VERB_ADVICE: Final = "begin with a verb, e.g. drop_refused_jobs; a question with is_ or has_"
"""The advice for functions and methods that break a rule of words."""

BETTER: Final = {
    "after": "next_x, or end_s",
    "asked": "arguments, or requests",
    "at": "index, position, or time_s",
    "before": "previous_x, or start_s",
    "chosen": "selected_jobs, solution, or the noun",
    "found": "the noun: case, match, path",
    "given": "options, values, or allocated_gpus",
    "held": "held_gpus, or lease",
    "kept": "filtered_draft, or retained_rows",
    "known": "state, cached_prices, or existing_ids",
    "least": "min_x",
    "left": "remaining_nodes, or remaining_s",
    "left_s": "remaining_s",
    "mine": "our_x, or left and right",
    "most": "max_x",
    "now": "now_s for a time, or current_gangs",
    "one": "the noun: arrival, job, node",
    "others": "other_jobs",
    "ours": "our_solver, or tessera_x",
    "own": "own_jobs, or is_own",
    "rest": "remaining_x",
    "sent_at_s": "sent_at_s",
    "seen": "view, estimates, or visited_nodes",
    "shown": "output, text, or to_result()",
    "since": "start_s",
    "stated": "user_plan, model, or requirements",
    "taken": "used_gpus, or selected_columns",
    "then": "next_x",
    "told": "last_estimates, or reports",
    "until": "end_s",
    "wanted": "target_columns, or requested_gpus",
    "whole": "integer_x, or full_x",
}
"""Better names for the words that were met most often."""


@cache
def rule_of(name: str, role: str) -> str | None:
    """Return the rule that a name breaks, or None for a good one.

    ``role`` is "class", "function", "method", "parameter", "attribute", "local" or "constant".
    """
    word = lone_word(name)
    if role == "method" and word in PROTOCOL_METHODS:
        return None
    if role == "parameter" and word in PROTOCOL_PARAMETERS:
        return None
    if word == "now" and role in ("function", "method"):  # a clock's
        return None
    if word in _RULE_OF_WORD:
        return _RULE_OF_WORD[word]
    if _EXTREME.fullmatch(word):
        return "quantifier"
    if _FRAGMENT.fullmatch(word) and not word.startswith("test_"):
        return "fragment"
    if word in _NOUNS or (role in ("function", "method") and word in VERBS):
        return None
    return "participle" if _PARTICIPLE.fullmatch(word) else None


def lone_word(name: str) -> str:
    """Return a name in lower case without the underscores and digits around it."""
    return name.strip("_").rstrip("_0123456789").lower()


def better_name(name: str, role: str, rule: str) -> str:
    """Return advice for a name that breaks a rule."""
    if role in ("function", "method"):
        return VERB_ADVICE
    suggestion = BETTER.get(lone_word(name))
    return f"{ADVICE[rule]}; here perhaps {suggestion}" if suggestion else ADVICE[rule]
