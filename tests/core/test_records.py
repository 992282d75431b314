import pickle

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from budgetguard_core.events import (
    Aborted,
    ModelCallAdmitted,
    ToolCallRequested,
    ToolCallsRequested,
    UserTurned,
)
from budgetguard_core.kit import Event, ModelCall
from budgetguard_core.records import line_of

PLACE = {"seq": 1, "run_id": "r", "at_ns": 2, "wall_ns": 3}


def test_a_record_that_a_user_makes_is_validated():
    event = Aborted(**PLACE, detail="enough")
    assert (event.event, event.seq, event.detail) == ("aborted", 1, "enough")
    with pytest.raises(ValidationError, match="detail"):
        Aborted(**PLACE)
    with pytest.raises(ValidationError, match="colour"):
        Aborted(**PLACE, detail="enough", colour="red")
    with pytest.raises(ValidationError, match="seq"):
        Aborted(**{**PLACE, "seq": "first"}, detail="enough")


def test_a_record_is_frozen():
    event = UserTurned(**PLACE)
    with pytest.raises(ValueError, match="frozen"):
        event.seq = 5
    assert pickle.loads(pickle.dumps(event)) == event


def test_a_record_becomes_plain_data():
    event = ModelCallAdmitted(
        **PLACE, call=ModelCall(model="m"), call_id=7, admitted_output_tokens=None, nudge=None
    )
    assert event.model_dump()["holds"] == ()
    plain = event.model_dump(mode="json")
    assert plain["holds"] == []
    assert plain["call"]["model"] == "m"
    assert list(plain) == [*PLACE, "call", "event", *list(plain)[6:]]
    assert line_of(event) == event.model_dump_json()


def test_records_are_fields_of_pydantics_models():
    class Page(BaseModel):
        events: list[Event]

    one = ToolCallRequested(
        call_id=None, id=None, name="a", kind="function", fingerprint="f", decision="refuse"
    )
    page = Page(
        events=[UserTurned(**PLACE).model_dump(), Aborted(**PLACE, detail="x").model_dump()]
    )
    assert page.events == [UserTurned(**PLACE), Aborted(**PLACE, detail="x")]
    assert Page.model_validate_json(page.model_dump_json()) == page
    batch = ToolCallsRequested(**PLACE, calls=(one,))
    assert TypeAdapter(Event).validate_json(batch.model_dump_json()) == batch


def test_a_line_has_nothing_that_a_terminal_obeys():
    event = Aborted(**PLACE, detail="a\x7fb\u2028c\ud800")
    assert line_of(event).endswith('"detail":"a\\u007fb\\u2028c?"}')
