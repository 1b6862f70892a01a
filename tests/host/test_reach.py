"""Reachability with real causes: a busy port, a port where nobody listens, a name without address, no interface."""

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.host import Host, parse_address
from meshwright.host.host import answer_within
from meshwright.host.reach import (
    can_bind,
    check_addresses,
    check_host_name,
    check_interfaces,
    check_loopback,
    check_rendezvous,
)
from tests.host.machines import make_host
from tests.processes import free_port

NETWORK = {"/sys/class/net/eth0/": "", "/sys/class/net/lo/": ""}


def only(findings):
    (finding,) = findings
    return finding


@pytest.fixture
def listening():
    """A port of the loopback that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_loopback_of_this_machine_carries_a_byte():
    assert only(check_loopback(Host())).status == "ok"


def test_an_address_where_something_listens_is_reached_and_another_is_not(listening):
    answered, refused = check_addresses([("127.0.0.1", listening), ("127.0.0.1", free_port())])
    assert (answered.status, answered.found) == ("ok", "answers")
    assert (refused.status, refused.found) == ("problem", "not reached: Connection refused")


def test_a_name_that_does_not_resolve_is_a_problem_within_seconds():
    start = time.monotonic()
    assert only(check_addresses([("no-such-host.invalid", 29500)])).status == "problem"
    assert time.monotonic() - start < 10


def test_a_busy_rendezvous_port_is_a_problem_and_a_free_one_is_not(tmp_path, listening):
    def judge(port):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return only(check_rendezvous(make_host(tmp_path, environment=environment)))

    busy = judge(listening)
    assert busy.status == "problem"
    assert "Address already in use" in busy.found
    assert judge(free_port()).status == "ok"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, "only one of the two is set"),
        ({"MASTER_PORT": "29500"}, "only one of the two is set"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65536"}, "the port is not valid"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "the port is not valid"),
        ({"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}, "does not resolve"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_a_problem(tmp_path, environment, words):
    finding = only(check_rendezvous(make_host(tmp_path, environment=environment)))
    assert finding.status == "problem"
    assert words in finding.found
    assert finding.remedy


def test_a_rendezvous_on_another_host_is_left_to_that_host(tmp_path):
    # 192.0.2.0/24 is kept for documentation (RFC 5737): no machine has it.
    environment = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    finding = only(check_rendezvous(make_host(tmp_path, environment=environment)))
    assert finding.status == "ok"
    assert "another host" in finding.found


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "problem"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", "problem"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "problem"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib", "problem"),
    ],
)
def test_an_interface_that_is_named_must_be_there(tmp_path, variable, value, status):
    finding = only(check_interfaces(make_host(tmp_path, NETWORK, environment={variable: value})))
    assert finding.status == status
    assert finding.name == variable
    if status == "problem":
        assert "eth0" in finding.remedy


def test_nothing_is_said_of_interfaces_that_nobody_named(tmp_path):
    assert not list(check_interfaces(make_host(tmp_path, NETWORK)))


def test_a_host_name_without_an_address_is_a_note_and_a_foreign_one_a_problem(tmp_path):
    unknown = only(check_host_name(make_host(tmp_path, name="no-such-host.invalid")))
    assert unknown.status == "note"
    assert "GLOO_SOCKET_IFNAME" in unknown.remedy
    foreign = only(check_host_name(make_host(tmp_path, name="192.0.2.1")))
    assert foreign.status == "problem"
    assert "not an address of this host" in foreign.found
    assert only(check_host_name(make_host(tmp_path, name="localhost"))).status == "ok"


def test_a_port_can_be_bound_once(listening):
    assert can_bind("127.0.0.1", free_port()) is None
    assert can_bind("127.0.0.1", listening) == "Address already in use"


@given(st.integers(1, 65535), st.sampled_from(["node1", "10.0.0.1", "a.b.example"]))
def test_addresses_are_split_at_the_last_colon(port, name):
    assert parse_address(f"{name}:{port}") == (name, port)


def test_addresses_of_version_6_stand_in_brackets():
    assert parse_address("[fe80::1%eth0]:29500") == ("fe80::1%eth0", 29500)


@pytest.mark.parametrize(
    "text", ["", "node1", "node1:", ":29500", "node1:0", "node1:65536", "::1:29500", "a b:1", "[]:1"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


def test_a_call_that_does_not_come_back_is_left_behind():
    start = time.monotonic()
    assert answer_within(0.1, lambda: time.sleep(5)) is None
    assert time.monotonic() - start < 2
    with pytest.raises(ZeroDivisionError):
        answer_within(1, lambda: 1 // 0)
