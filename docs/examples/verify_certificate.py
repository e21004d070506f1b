"""Check a round's answer and the proof of its bound, in integers, with nothing of Tessera:
`tessera certificate export ROUND | python verify_certificate.py` ends with 0 if all is proven."""

import json
import sys


def require(holds, problem):
    """End the program unless ``holds``."""
    return holds or sys.exit(f"not proven: {problem}")


def value_answer(rows, classes):
    """Return what the answer is worth. It fits into all rows, and no job takes two columns."""
    worth, used = 0, [0] * len(rows)
    for kind in classes:
        counts = [count for _, _, count in kind["columns"]]
        fewest = kind["jobs"] if kind["must_run"] else 0
        require(min([0, *counts]) == 0 and fewest <= sum(counts) <= kind["jobs"], "wrong counts")
        for value, uses, count in kind["columns"]:
            worth += value * count
            for r, amount in uses:
                used[r] += amount * count
    require(all(u <= row["room"] for u, row in zip(used, rows, strict=True)), "a row is overfull")
    return worth


def solve_knapsack(items, room):
    """Return the largest gain if of each item up to `jobs` jobs take one (amount, gain) each."""
    best = [0] * (1 + min(room, sum(jobs * max(ways)[0] for jobs, ways in items)))
    for jobs, ways in items:
        for _ in range(min(jobs, room // min(ways)[0])):
            before = best
            for n, gain in ways:
                best = best[:n] + [max(b, a + gain) for a, b in zip(before, best[n:])]  # noqa: B905
            if best == before:
                break
    return best[-1]


def bound_leaf(rows, classes, leaf, cases, scale):
    """Return `scale` times the most that answers are worth if sign * sum <= most in all cases."""
    prices, own, paid = dict(leaf["prices"]), dict(leaf["job_prices"]), {}
    require(min([0, *prices.values(), *leaf["branch_prices"]]) == 0, "a price is negative")
    total = sum(price * rows[r]["room"] for r, price in prices.items())
    for price, (sign, columns, most) in zip(leaf["branch_prices"], cases, strict=True):
        total += price * most
        paid |= {(k, c): paid.get((k, c), 0) + sign * price for k, c in columns}
    items = {r: [] for r in leaf["knapsacks"]}
    for k, kind in enumerate(classes):
        base, ways = own.get(k, 0), {None: []}  # None: the columns outside of knapsacks
        require(base >= 0 or kind["must_run"], "a job that may wait has a negative price")
        for c, (value, uses, _) in enumerate(kind["columns"]):
            cost = base + paid.get((k, c), 0) + sum(prices.get(r, 0) * n for r, n in uses)
            solved = [(r, n) for r, n in uses if r in items] or [(None, 0)]
            require(len(solved) == 1, "a column uses two knapsacks")
            ways.setdefault(solved[0][0], []).append((solved[0][1], scale * value - cost))
        outside = [gain for _, gain in ways.pop(None)]
        free = items or not outside or not kind["must_run"]  # it may take none of these columns
        total += kind["jobs"] * (base + max([0, *outside] if free else outside))
        for r in ways:
            items[r].append((kind["jobs"], ways[r]))
    return total + sum(solve_knapsack(items[r], rows[r]["room"]) for r in items)


for goal in json.load(sys.stdin)["goals"]:
    rows, classes, scale = goal["rows"], goal["classes"], goal["denominator"]
    require(goal["version"] == 1, "this is another version of the file's format")
    bounds, cases_of = [], {0: ()}
    for place, node in enumerate(goal["nodes"]):  # a branch has two later nodes; each case counts
        here = cases_of.pop(place)
        if "most" in node:
            cases_of[node["below"]] = (*here, (1, node["columns"], node["most"]))
            cases_of[node["above"]] = (*here, (-1, node["columns"], -node["most"] - 1))
        else:
            bounds.append(bound_leaf(rows, classes, node, here, scale))
    require(len(goal["nodes"]) == 2 * len(bounds) - 1 and scale > 0, "the branches are no tree")
    worth, bound = value_answer(rows, classes), max(bounds) // scale
    require(goal["objective"] == worth <= bound <= goal["bound"], f"worth {worth}, bound {bound}")
    print(f"{goal['name']}: worth {worth}, and no answer above {bound}, in {goal['unit']}")
