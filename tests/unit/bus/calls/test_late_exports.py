"""What a script defines while it runs, and calls that come before."""

import threading
import types

import pytest

from unified.bus.calls.late_exports import LateExports
from unified.bus.calls.registry import MethodRegistry, rpc


def test_a_call_waits_for_the_definition_and_for_no_longer_than_its_time() -> None:
    registry, module = MethodRegistry(), types.ModuleType("__main__")
    late = LateExports(module, registry=registry, within_s=0.2)
    over = threading.Event()
    assert late.keep("never", over.set)
    assert over.wait(10), "its time is over"
    assert not late.keep("never", over.set)
    assert not late.keep("unified.queue.get", over.set), "the runtime knows what it has"
    late.close()


def test_what_is_defined_anew_takes_the_place_of_what_was() -> None:
    registry, module = MethodRegistry(), types.ModuleType("__main__")
    late = LateExports(module, registry=registry)
    for answer in (1, 2):
        exec(f"@rpc\ndef f(): return {answer}", vars(module) | {"rpc": rpc}, vars(module))
        assert not late.keep("f", lambda: None)
        assert registry["f"]() == answer
    late.close()
    assert registry["f"]() == 2
    assert registry.on_missing is None


def test_two_functions_of_one_name_are_refused_at_the_end() -> None:
    registry, module = MethodRegistry(), types.ModuleType("__main__")
    late = LateExports(module, registry=registry)
    exec("@rpc('same')\ndef f(): pass\n@rpc('same')\ndef g(): pass", vars(module) | {"rpc": rpc}, vars(module))
    assert not late.keep("same", lambda: None)
    assert registry["same"] is vars(module)["f"]
    with pytest.raises(ValueError, match="RPC method 'same' already registered"):
        late.close()
