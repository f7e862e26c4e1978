"""Chunks of a held-out evaluation: who gets which, worked out by hand."""

from trainer.link.evaluation import split_evaluation


def test_each_sampler_gets_its_share_of_the_chunks_and_those_of_a_lost_one_become_free() -> None:
    evaluation = split_evaluation("v40", 130, 26)  # five chunks
    of_a = [request.chunk for request in evaluation.grant("a", num_samplers=2)]
    of_b = [request.chunk for request in evaluation.grant("b", num_samplers=2)]
    assert (of_a, of_b) == ([0, 1, 2], [3, 4])
    assert [request.chunk for request in evaluation.grant("a", num_samplers=2)] == of_a, "no more than its share"
    assert evaluation.release("b") == of_b
    assert [request.chunk for request in evaluation.grant("a", num_samplers=1)] == [0, 1, 2, 3, 4]
