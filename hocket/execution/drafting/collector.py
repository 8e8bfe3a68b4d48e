"""What a worker's draft controller knows and does, for the metrics page."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hocket.scheduling.draft_controller import DraftController


class DraftCollector(Collector):
    """A snapshot of the controller whenever someone asks."""

    def __init__(self, drafts: DraftController, synthetic_acceptance: float) -> None:
        self._drafts = drafts
        self._synthetic_acceptance = synthetic_acceptance

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        now = self._drafts.snapshot()
        counts = [
            ("steps", now.steps, "Decode steps whose drafts were decided."),
            ("probes", now.probes, "Of these, steps with a draft more, to find out."),
            ("allotted", now.allotted_drafts, "Drafts that requests were given in these steps."),
        ]
        for name, value, text in counts:
            counter = CounterMetricFamily(f"hocket_draft_controller_{name}", text)
            counter.add_metric([], float(value))
            yield counter

        text = "Expected chance that a draft is kept when those before it were."
        expected = GaugeMetricFamily(
            "hocket_draft_controller_acceptance", text, labels=["sampling", "position"]
        )
        kinds = {"sampled": now.acceptance_sampled, "greedy": now.acceptance_greedy}
        for kind, acceptance in kinds.items():
            for position, chance in enumerate(acceptance):
                expected.add_metric([kind, str(position)], chance)
        yield expected

        text = "Expected seconds of a pass of so many rows."
        costs = GaugeMetricFamily(
            "hocket_draft_controller_pass_seconds", text, labels=["of", "rows"]
        )
        for half, points in {"draft": now.draft_costs, "verify": now.verify_costs}.items():
            for rows, seconds in points:
                costs.add_metric([half, str(rows)], seconds)
        yield costs

        text = "Seconds that each request adds to a verify pass, beside its rows."
        yield GaugeMetricFamily("hocket_draft_controller_request_seconds", text, now.request_s)

        text = "Rate at which drafts are kept whatever the model says: for benchmarks. 0: off."
        synthetic = GaugeMetricFamily("hocket_worker_synthetic_acceptance", text)
        synthetic.add_metric([], self._synthetic_acceptance)
        yield synthetic
