import pytest
import torch

from hf_posenc.metrics.statistics import cosine_distance, relative_l2


def test_relative_l2_has_the_mean_length_as_its_unit():
    first, second = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])
    assert relative_l2(first, second) == pytest.approx(10**0.5 / 2)
    assert relative_l2(first, -first) == pytest.approx(2.0)
    assert relative_l2(100 * first, 100 * second) == pytest.approx(relative_l2(first, second))


def test_cosine_distance_is_one_minus_the_cosine():
    torch.manual_seed(0)
    first, second = torch.randn(2, 50)
    expected = 1 - torch.nn.functional.cosine_similarity(first, second, dim=0).item()
    assert cosine_distance(first, second) == pytest.approx(expected, abs=1e-6)
    assert cosine_distance(first, -first) == pytest.approx(2.0)


def test_cosine_distance_resolves_differences_that_one_minus_the_cosine_loses():
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    second = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert 1 - torch.nn.functional.cosine_similarity(first, second, dim=0).item() == 0.0
    assert cosine_distance(first, second) == pytest.approx(5e-19)


def test_equal_and_zero_vectors():
    vector, zero = torch.randn(7), torch.zeros(7)
    assert relative_l2(vector, vector.clone()) == 0.0
    assert cosine_distance(vector, vector.clone()) == 0.0
    assert relative_l2(zero, zero) == 0.0
    assert cosine_distance(zero, zero) == 0.0
    assert relative_l2(vector, zero) == pytest.approx(2.0)
    assert cosine_distance(vector, zero) == 1.0


def test_low_precision_is_compared_in_float64():
    first = torch.full((4096,), 300.0, dtype=torch.float16)
    assert relative_l2(first, -first) == pytest.approx(2.0)  # the norm alone overflows float16
