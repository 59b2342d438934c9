"""The rank of a process, by the environment that torchrun sets."""

import pytest

from learner.distributed.collectives import ProcessRank, process_rank
from learner.process.build import make_trainer
from pipeline.errors import ConfigurationError


def test_without_torchrun_there_is_one_process(kit):
    assert process_rank(kit.learner_config(), {}) == ProcessRank(0, 1, 0)
    assert process_rank(kit.learner_config(ranks=4), {}) == ProcessRank(0, 1, 0)


def test_torchrun_sets_the_rank(kit):
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert process_rank(kit.learner_config(), environment) == ProcessRank(5, 8, 1)
    assert process_rank(kit.learner_config(ranks=8), environment) == ProcessRank(5, 8, 1)


@pytest.mark.parametrize(
    ("environment", "ranks", "words"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, 1, "RANK below WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, 1, "RANK below WORLD_SIZE"),
        ({"RANK": "first", "WORLD_SIZE": "8"}, 1, "whole numbers"),
        ({"RANK": "1", "WORLD_SIZE": "8"}, 4, "omit learner.ranks under torchrun"),
    ],
)
def test_a_rank_that_contradicts_is_refused_with_words(kit, environment, ranks, words):
    with pytest.raises(ConfigurationError, match=words):
        process_rank(kit.learner_config(ranks=ranks), environment)


def test_ranks_that_are_no_whole_replicas_or_context_groups_are_refused_with_words(kit):
    environment = {"RANK": "1", "WORLD_SIZE": "8"}
    for learner in ({"replicas": 3}, {"context_ranks": 3}, {"replicas": 4, "context_ranks": 4}):
        with pytest.raises(ConfigurationError, match="got 8 ranks"):
            process_rank(kit.learner_config(**learner), environment)
    assert process_rank(kit.learner_config(replicas=4, context_ranks=2), environment) == ProcessRank(1, 8, 1)
    with pytest.raises(ConfigurationError, match=r"context_ranks \(2\), got 1 ranks"):
        process_rank(kit.learner_config(context_ranks=2), {})


def test_what_several_ranks_cannot_do_is_refused_before_anything_is_divided(kit, tmp_path):
    kit.tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="ranks"):
        make_trainer(kit.run_config({"optimizer": "adamw_8bit"}), tmp_path, None, object())  # of torchrun
