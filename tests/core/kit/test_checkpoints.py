"""A run gives its store what is new, and is told when another attempt has begun."""

from __future__ import annotations

import pytest

from budgetguard_core import Budget, Guard, MemoryStore, RunFencedError, Snapshot
from budgetguard_core.kit import Envelope, load_to_resume
from budgetguard_core.kit.checkpoints import Checkpoints


class Watched(MemoryStore):
    """Counts the messages that it is given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def append(self, snapshot, **arguments):
        number = super().append(snapshot, **arguments)
        self.given.append((arguments.get("start", 0), len(snapshot.messages)))
        return number


class Plain:
    """A store of the user's own, with no more than the three verbs."""

    def __init__(self):
        self.kept = {}

    def save(self, snapshot):
        self.kept[snapshot.run_id] = snapshot

    def load(self, run_id):
        return self.kept.get(run_id)

    def delete(self, run_id):
        del self.kept[run_id]


@pytest.fixture
def store():
    return Watched()


def opened(store, run_id="r", **options):
    return Envelope(budget=Budget(max_iterations=9), store=store).open(run_id=run_id, **options)


def messages(*names):
    return [{"content": name} for name in names]


def names(snapshot):
    return [message["content"] for message in snapshot.messages]


def test_what_was_saved_before_is_not_given_again(store):
    run, history = opened(store), messages("a", "b")
    run.save(history)
    history += messages("c")
    run.save(history)
    run.save()
    run.save(history, messages("pending"))
    assert store.given == [(0, 2), (2, 1), (3, 0), (3, 1)]
    assert names(store.load("r")) == ["a", "b", "c", "pending"]


def test_what_was_pending_moves_as_the_batch_fills(store):
    run, history, results = opened(store), messages("a"), messages("one", "two", "three")
    run.save(history)
    run.save(history, [results[1]])
    run.save(history, [results[0], results[1]])
    run.save([*history, *results])
    assert store.given == [(0, 1), (1, 1), (1, 2), (3, 1)]
    assert names(store.load("r")) == ["a", "one", "two", "three"]


def test_only_what_is_new_is_written_as_plain_data(store):
    run, history, written = opened(store), messages("a"), []

    def to_plain(new):
        written.append(len(new))
        return [{"content": one["content"].upper()} for one in new]

    for name in "bcd":
        run.save(history, to_plain=to_plain)
        history += messages(name)
    assert written == [1, 1, 1]
    assert names(store.load("r")) == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (lambda history: history.pop(), 2),
        (lambda history: history.__setitem__(slice(1, 3), messages("summary")), 1),
        (lambda history: history.insert(0, {"content": "first"}), 0),
        (lambda history: history.clear(), 0),
    ],
    ids=["one less", "a summary", "one in front", "none"],
)
def test_a_conversation_that_was_changed_is_saved_as_it_is(store, change, start):
    run, history = opened(store), messages("a", "b", "c")
    run.save(history)
    change(history)
    run.save(history)
    assert names(store.load("r")) == [message["content"] for message in history]
    assert store.given[-1][0] == start


def test_what_was_changed_in_place_is_saved_at_the_end(store):
    run, history = opened(store), messages("a", "b")
    run.save(history)
    history[0]["content"] = "cleared"
    run.save(history)
    assert names(store.load("r")) == ["a", "b"]
    run.end(history)
    assert names(store.load("r")) == ["cleared", "b"]


def test_a_store_of_the_users_own_gets_the_whole():
    store = Plain()
    run, history = opened(store), messages("a")
    run.save(history)
    run.save([*history, *messages("b")])
    assert names(store.load("r")) == ["a", "b"]
    assert load_to_resume(store, "r") == (store.load("r"), None)
    run.end(messages("end"))
    assert names(store.load("r")) == ["end"]


def test_what_somebody_else_saved_or_deleted_in_between_costs_nothing(store):
    run, history = opened(store), messages("a", "b")
    run.save(history)
    store.save(run.guard.snapshot(["other"]))
    run.save(history)
    assert names(store.load("r")) == ["a", "b"]
    store.delete("r")
    run.save(history)
    assert names(store.load("r")) == ["a", "b"]


def test_a_store_that_fails_once_is_reported_and_misses_nothing(store, monkeypatch):
    run, history = opened(store), messages("a")
    run.save(history)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    history += messages("b")
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "append", full)
        run.save(history)
    assert len(run.guard.tree.errors) == 1
    history += messages("c")
    run.save(history)
    assert names(store.load("r")) == ["a", "b", "c"]


def test_a_run_that_was_resumed_elsewhere_is_told(store):
    run = opened(store)
    run.save(messages("a"))
    snapshot, attempt = load_to_resume(store, "r")
    again = opened(store, run_id=None, resume=snapshot)
    again.go_on_as(attempt, "r")
    with pytest.raises(RunFencedError, match="run 'r' was resumed elsewhere"):
        run.save(messages("a", "late"))
    assert run.guard.tree.errors == ()
    again.save(messages("a", "b"))
    outcome = run.end(messages("late"))
    assert "resumed elsewhere" in outcome.errors[0]
    assert names(store.load("r")) == ["a", "b"]


def test_of_two_that_resume_at_the_same_time_one_goes_on(store):
    opened(store).save(messages("a"))
    runs = []
    for _ in range(2):
        snapshot, attempt = load_to_resume(store, "r")
        runs.append(opened(store, run_id=None, resume=snapshot))
        runs[-1].go_on_as(attempt, "r")
    with pytest.raises(RunFencedError):
        runs[0].save()
    runs[1].save(messages("b"))
    assert names(store.load("r")) == ["b"]


def test_a_run_that_is_begun_anew_under_an_old_name_fences_the_old_one(store):
    old, new = opened(store), opened(store)
    old.save(messages("old"))
    new.save(messages("new"))
    with pytest.raises(RunFencedError):
        old.save()
    assert names(store.load("r")) == ["new"]


def test_a_leg_of_another_run_is_not_taken(store):
    opened(store).save(messages("a"))
    attempt = load_to_resume(store, "r")[1]
    other = Envelope(budget=Guard(run_id="other"), store=store).open()
    other.go_on_as(attempt, "r")
    store.claim("other")
    store.claim("other")
    other.save(messages("b"))
    assert names(store.load("other")) == ["b"]
    assert load_to_resume(store, "unknown") == (None, None)
    without = Envelope(budget=Budget()).open()
    without.go_on_as(1, without.guard.run_id)


def test_a_fenced_part_or_whole_stops_whoever_saves(store):
    parent = opened(store)
    parent.save(messages("a"))
    with parent.entered():
        child = Envelope(budget=Budget()).open()
    store.claim("r")
    with pytest.raises(RunFencedError):
        child.save(messages("b"))


def test_the_cost_of_a_checkpoint_does_not_grow():
    class Counting(list):
        """A conversation that counts how many of its messages are looked at."""

        looked_at = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            Counting.looked_at += len(found) if isinstance(key, slice) else 1
            return found

        def __iter__(self):
            raise AssertionError("somebody walks the conversation")

    given = []

    class Last(MemoryStore):
        def append(self, snapshot: Snapshot, **arguments):
            given.append(len(snapshot.messages))
            return super().append(snapshot, **arguments)

    history = Counting()
    checkpoints = Checkpoints(Guard(run_id="r"), Last())
    for turn in range(2000):
        history += messages(f"ask {turn}", f"answer {turn}")
        checkpoints.take(history)
        checkpoints.put()
    assert max(given) == 2
    assert Counting.looked_at < 4 * len(history)
