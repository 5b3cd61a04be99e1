"""Tests of the backend again, with every second rank on another host: same results, same errors, same repairs.

A host is a loopback address and a key here, and memory of another "host" is refused; so this needs no rights.
"""

from __future__ import annotations

import pytest

from tests.backend.test_async import (  # noqa: F401 - pytest finds them here
    test_futures_complete_with_the_tensors_or_raise,
    test_many_calls_may_be_outstanding,
    test_overlapping_groups_run_side_by_side,
    test_several_threads_on_one_group,
)
from tests.backend.test_collectives import (  # noqa: F401
    test_coalesced_forms_equal_the_single_calls,
    test_float_sums_are_bit_identical_on_all_ranks_and_between_runs,
    test_object_collectives_work,
    test_outputs_may_alias_inputs,
    test_special_floats_are_reduced_alike_on_all_ranks,
    test_the_mean_of_integers_does_not_wrap_and_truncates_towards_zero,
)
from tests.backend.test_interrupts import (  # noqa: F401
    test_an_interrupted_receive_neither_takes_nor_loses_a_message,
    test_real_signals_at_random_moments_leave_the_ranks_in_step,
)
from tests.backend.test_mismatch import (  # noqa: F401
    test_a_call_that_one_rank_refuses_fails_on_the_others_with_its_reason,
    test_a_mismatch_leaves_every_tensor_bit_identical,
    test_every_disagreement_is_an_error_on_every_rank_that_names_both_sides,
)
from tests.backend.test_p2p import (  # noqa: F401
    test_a_message_larger_than_its_lane_arrives,
    test_a_receive_from_any_source_tells_which,
    test_a_receive_takes_the_oldest_message_with_its_tag,
    test_a_receive_that_timed_out_leaves_tensor_and_lane_usable,
    test_a_send_that_timed_out_half_way_is_skipped_by_the_receiver,
    test_a_size_or_dtype_mismatch_is_an_error_on_both_sides_and_both_live_on,
    test_more_messages_than_a_lane_holds_queue_up_at_the_sender,
    test_random_traffic_keeps_order_per_source_and_tag,
)
from tests.backend.test_properties import test_random_programs_give_what_the_model_says  # noqa: F401
from tests.backend.test_torch_stack import (  # noqa: F401
    test_ddp_and_fsdp2_train_as_with_gloo,
    test_functional_collectives_work,
    test_meshes_and_dtensors_work,
)
from tests.backend.test_withdrawal import (  # noqa: F401
    test_a_call_that_is_given_up_fails_everywhere,
    test_a_rank_that_comes_with_the_time_out_ends_as_the_others_do,
)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the ranks on two hosts in turns."""
    monkeypatch.setenv("EPEE_TEST_PLACEMENT", "01")
