"""The metrics of click models, for the Keras of TF_USE_LEGACY_KERAS."""

import numpy as np
import pytest

import tfswitch as tsw
from tfswitch.keras._backend import keras

METRICS = [
    tsw.metrics.Calibration,
    tsw.metrics.NormalizedEntropy,
    tsw.metrics.GroupAUC,
]
RNG = np.random.default_rng(11)
GROUPS = RNG.integers(0, 12, 400)
SCORES = RNG.integers(0, 50, 400) / 50 + 0.01  # Many are equal.
LABELS = RNG.random(400) < SCORES * (GROUPS != 3)
WEIGHTS = RNG.integers(1, 4, 400)


def auc(labels, scores, weights):
    """The share of pairs of a positive and a negative that are in order."""
    above = scores[labels][:, None] - scores[~labels][None, :]
    pairs = weights[labels][:, None] * weights[~labels][None, :]
    return (pairs * ((above > 0) + 0.5 * (above == 0))).sum() / pairs.sum()


def group_auc(weighting):
    areas, weights = [], []
    for group in range(12):
        mine = GROUPS == group
        if 0 < LABELS[mine].sum() < mine.sum():
            areas.append(auc(LABELS[mine], SCORES[mine], WEIGHTS[mine]))
            weights.append(
                {
                    "samples": WEIGHTS[mine].sum(),
                    "positives": WEIGHTS[mine][LABELS[mine]].sum(),
                    "equal": 1,
                }[weighting]
            )
    assert len(areas) < 12  # All labels of group 3 are 0.
    return np.average(areas, weights=weights)


@pytest.mark.parametrize("weighting", ["samples", "positives", "equal"])
def test_group_auc_is_the_mean_of_the_groups(weighting):
    metric = tsw.metrics.GroupAUC(12, 50, weighting)
    # In batches; other numbers of the same groups; label and group together.
    metric.update_state(
        LABELS[:300], SCORES[:300], WEIGHTS[:300], GROUPS[:300] - 12
    )
    both = np.stack([LABELS, GROUPS], axis=1).astype(np.int64)
    metric.update_state(both[300:], SCORES[300:, None], WEIGHTS[300:])

    np.testing.assert_allclose(metric.result(), group_auc(weighting), rtol=1e-5)


@pytest.mark.parametrize("from_logits", [False, True])
def test_calibration_and_entropy_are_those_of_the_formulas(from_logits):
    scores = np.clip(SCORES, 0.02, 0.98)
    given = np.log(scores / (1 - scores)) if from_logits else scores
    calibration = tsw.metrics.Calibration(from_logits=from_logits)
    entropy = tsw.metrics.NormalizedEntropy(from_logits=from_logits)
    for metric in (calibration, entropy):
        for part in (slice(0, 300), slice(300, 400)):
            metric.update_state(LABELS[part], given[part], WEIGHTS[part])

    clicks = np.average(LABELS, weights=WEIGHTS)
    loss = np.average(
        -np.log(np.where(LABELS, scores, 1 - scores)), weights=WEIGHTS
    )
    np.testing.assert_allclose(
        calibration.result(),
        clicks / np.average(scores, weights=WEIGHTS),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        entropy.result(),
        loss / -(clicks * np.log(clicks) + (1 - clicks) * np.log(1 - clicks)),
        rtol=1e-5,
    )


@pytest.mark.parametrize("metric_class", METRICS)
def test_states_of_parts_add_up_and_nothing_is_nan(metric_class):
    both = np.stack([LABELS, GROUPS], axis=1).astype(np.int64)
    labels = both if metric_class is tsw.metrics.GroupAUC else LABELS
    whole, *parts = (metric_class() for _ in range(3))
    whole.update_state(labels, SCORES)
    parts[0].update_state(labels[:250], SCORES[:250])
    parts[1].update_state(labels[250:], SCORES[250:])

    merged = metric_class.from_config(parts[0].get_config())
    assert np.isnan(merged.result())
    for one, *others in zip(
        merged.variables, *(part.variables for part in parts), strict=True
    ):
        one.assign(sum(other.numpy() for other in others))

    np.testing.assert_allclose(merged.result(), whole.result(), rtol=1e-5)


def test_fit_takes_groups_beside_labels():
    inputs = keras.Input((1,))
    click = keras.layers.Dense(1, activation="sigmoid", name="click")(inputs)
    by_user = keras.layers.Activation("linear", name="by_user")(click)
    model = keras.Model(inputs, {"click": click, "by_user": by_user})
    model.compile(
        keras.optimizers.SGD(0.0),
        {"click": "binary_crossentropy"},
        metrics={
            "click": [tsw.metrics.Calibration()],
            "by_user": [tsw.metrics.GroupAUC()],
        },
    )
    labels = {
        "click": LABELS[:, None].astype(np.float32),
        "by_user": np.stack([LABELS, GROUPS], axis=1).astype(np.int64),
    }

    history = model.fit(SCORES[:, None], labels, verbose=0).history

    expected = tsw.metrics.GroupAUC()
    expected.update_state(
        labels["by_user"], model.predict(SCORES[:, None], verbose=0)["by_user"]
    )
    np.testing.assert_allclose(
        history["by_user_group_auc"], [float(expected.result())], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_groups": 0}, "num_groups=0"),
        ({"num_bins": 1}, "num_bins=1"),
        ({"weighting": "users"}, "weighting='users'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tsw.metrics.GroupAUC(**arguments)


def test_labels_without_groups_are_refused():
    with pytest.raises(ValueError, match=r"pass `groups=`.*\(4,\)"):
        tsw.metrics.GroupAUC().update_state(np.zeros(4), np.zeros(4))
