"""Metrics whose labels clients could choose."""

from helpers.apps import ask, make_service

from instgenie.server.app import make_app


def test_methods_that_clients_make_up_share_one_label() -> None:
    service = make_service(api_key=["k"])
    app = make_app(service, "0")
    for method in ["GET", "BREW", *(f"X{number}" for number in range(50)), "X" * 5000]:
        assert ask(app, method, "/v1/models").status_code == 401
    labels = {sample.labels["method"] for metric in service.metrics.http.collect() for sample in metric.samples}
    assert labels == {"GET", "other"}
