//! Limits of time and number, a full disk, a daemon that fails, and many calls at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::http::serve;
use super::super::model::{READY_V4, READY_V6};
use super::super::plugin::{CALLS_MAX, SETUP_LIMIT_MS, setups_max};
use super::super::requests::BackendError;
use super::super::state::{CREATION_S, POOL_RETRY_S, SUSPECT_S};
use super::{Create, Docker, GATEWAY, Network, Run, text};

/// Docker's longest patience that a test demands.
const LIMIT: Duration = Duration::from_secs(10);

async fn ready(docker: &Docker) -> Network {
    docker.create(Create { id: "n1", ..Create::default() }).await.unwrap()
}

fn broken() -> BackendError {
    BackendError::Failed { what: "reach the kernel".to_owned(), why: "no memory".to_owned() }
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_is_not_ready_is_waited_for_but_not_longer_than_docker_bears() {
    let docker = Docker::new();
    docker.daemon.world().is_ready = false;
    let start = Instant::now();
    let error = docker.create(Create { id: "n1", ..Create::default() }).await.unwrap_err();
    assert!(error.contains("not ready"), "{error}");
    assert!(start.elapsed() < LIMIT);
    // Giving back does not wait.
    let start = Instant::now();
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    docker.network("Leave", ids).await.unwrap();
    docker.ipam("ReleasePool", json!({"PoolID": "x"})).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    // It becomes ready meanwhile, as after a reboot.
    let waiting = tokio::spawn({
        let docker = docker.clone();
        async move { ready(&docker).await }
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    docker.daemon.world().is_ready = true;
    let network = waiting.await.unwrap();
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// Starts containers at the same time. Each sends the time after which it has started.
fn start_all(
    (docker, network): (&Docker, &Network),
    name: &str,
    count: usize,
) -> mpsc::UnboundedReceiver<Duration> {
    let (sender, started) = mpsc::unbounded_channel();
    for number in 0..count {
        let (docker, network, sender) = (docker.clone(), network.clone(), sender.clone());
        let endpoint = format!("{name}{number}");
        tokio::spawn(async move {
            let start = Instant::now();
            docker.run(&network, Run { endpoint: &endpoint, ..Run::default() }).await.unwrap();
            sender.send(start.elapsed()).unwrap();
        });
    }
    started
}

#[tokio::test(start_paused = true)]
async fn the_engine_starts_a_few_containers_at_a_time() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    docker.daemon.world().is_set_up = false;
    let setups = setups_max();
    let mut started = start_all((&docker, &network), "a", 3 * setups);
    tokio::time::sleep(Duration::from_millis(SETUP_LIMIT_MS / 2)).await;
    assert_eq!(started.len(), setups);
    docker.daemon.world().is_set_up = true;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(started.len(), 3 * setups);
    while !started.is_empty() {
        started.recv().await.unwrap();
    }
    // A container that has no link in the end stands in nobody's way for long, and no call waits until it is late.
    docker.daemon.world().is_set_up = false;
    let mut started = start_all((&docker, &network), "b", 6 * setups);
    for number in 0..6 * setups {
        let after = started.recv().await.unwrap();
        let limit = Duration::from_millis(SETUP_LIMIT_MS);
        match number / setups {
            0 => assert!(after < limit, "{number}: {after:?}"),
            1 => assert!(after >= limit && after < 2 * limit, "{number}: {after:?}"),
            _ => assert!(after >= 2 * limit && after < LIMIT, "{number}: {after:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn it_is_quiet_once_docker_waits_for_no_answer() {
    let docker = Docker::new();
    docker.plugin.quiet().await;
    docker.daemon.world().delay = Duration::from_secs(5);
    let waiting = tokio::spawn({
        let docker = docker.clone();
        async move { ready(&docker).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let start = Instant::now();
    docker.plugin.quiet().await;
    assert!(start.elapsed() >= Duration::from_secs(4), "{:?}", start.elapsed());
    let network = waiting.await.unwrap();
    // Docker hangs up.
    let call = docker.network("DeleteNetwork", json!({"NetworkID": "n1"}));
    let _ = tokio::time::timeout(Duration::from_secs(1), call).await;
    let start = Instant::now();
    docker.plugin.quiet().await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    docker.daemon.world().delay = Duration::ZERO;
    docker.remove(&network).await;
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_hangs_is_answered_for_and_its_late_result_is_taken_back() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    docker.daemon.world().delay = Duration::from_secs(20);
    let ids = json!({"NetworkID": "n1", "EndpointID": "e2"});
    let late = [
        ("IpamDriver.RequestAddress", json!({"PoolID": network.pool_id}), false),
        ("IpamDriver.RequestPool", json!({"Options": {"network": "shop"}}), false),
        ("NetworkDriver.EndpointOperInfo", json!({"NetworkID": "n1", "EndpointID": "e1"}), true),
        ("NetworkDriver.Leave", json!({"NetworkID": "n1", "EndpointID": "e1"}), true),
    ];
    for (method, body, succeeds) in late {
        let start = Instant::now();
        let answer = docker.post(method, body).await;
        assert!(start.elapsed() < LIMIT, "{method}");
        assert_eq!(answer.is_ok(), succeeds, "{method}: {answer:?}");
    }
    let create = json!({
        "NetworkID": "n1", "EndpointID": "e2", "Interface": {"Address": "10.32.0.9/12"},
    });
    docker.network("CreateEndpoint", create).await.unwrap();
    let error = docker.network("Join", ids.clone()).await.unwrap_err();
    assert!(error.contains("did not finish within"), "{error}");
    // The engine gives up in order, and the daemon recovers.
    docker.network("Leave", ids.clone()).await.unwrap();
    docker.network("DeleteEndpoint", ids).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    docker.daemon.world().delay = Duration::ZERO;
    docker.stop(&web).await;
    docker.remove(&network).await;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    docker.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_hangs_up_gets_nothing() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    docker.daemon.world().delay = Duration::from_secs(3);
    let call = docker.address(&network.pool_id, "", Value::Null);
    assert!(tokio::time::timeout(Duration::from_secs(1), call).await.is_err());
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(docker.daemon.world().held.is_empty());
    docker.daemon.world().delay = Duration::ZERO;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn a_full_disk_refuses_new_promises_and_takes_back_old_ones() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    let before = docker.plugin.state().await;
    docker.daemon.world().disk_is_full = true;
    let error = docker.run(&network, Run { endpoint: "e2", ..Run::default() }).await.unwrap_err();
    assert!(error.contains("cannot store") && error.contains("no space left"), "{error}");
    let subnet = "10.40.0.0/16";
    let options = json!({"network": "shop"});
    let create = Create {
        id: "n2",
        options: options.clone(),
        ipam_options: options,
        subnet,
        ..Create::default()
    };
    docker.create(create).await.unwrap_err();
    assert!(docker.plugin.state().await.promises_as(&before));
    assert_eq!(docker.daemon.world().held.len(), 1);
    // Giving back succeeds, and is done.
    docker.stop(&web).await;
    docker.remove(&network).await;
    assert!(docker.daemon.world().is_clean());
    docker.daemon.world().disk_is_full = false;
    // After a kill the disk still knows the old state: everything goes that Docker does not list.
    let docker = docker.restart();
    let mut listing = docker.daemon.world().listing();
    listing.networks = Some(Default::default());
    docker.plugin.reconcile(&listing).await;
    assert!(docker.daemon.world().is_clean());
}

/// A result that cannot be stored is taken back, whichever write fails.
#[tokio::test(start_paused = true)]
async fn a_disk_that_fills_up_at_any_time_leaves_nothing() {
    /// The writes of the calls below.
    const WRITES: u32 = 6;
    for writes in 0..=WRITES {
        let docker = Docker::new();
        docker.daemon.world().writes_left = Some(writes);
        let options = json!({"network": "shop"});
        let create = Create { id: "n1", options, subnet: "10.40.0.0/16", ..Create::default() };
        let created = docker.create(create).await;
        if let Ok(network) = &created {
            let before = docker.plugin.state().await;
            let address = docker.address(&network.pool_id, "", Value::Null).await;
            assert_eq!(address.is_ok(), writes == WRITES);
            // Even before the engine gives anything back.
            let same = docker.plugin.state().await.holds_as(&before);
            assert!(same || address.is_ok(), "after {writes} writes");
        }
        assert_eq!(docker.daemon.world().disk_is_full, writes < WRITES, "{writes}");
        docker.daemon.world().disk_is_full = false;
        docker.daemon.world().writes_left = None;
        // A kill: the disk knows all that is held.
        let docker = docker.restart();
        for _ in 0..2 {
            let mut listing = docker.daemon.world().listing();
            listing.networks = Some(BTreeMap::new());
            docker.plugin.reconcile(&listing).await;
            tokio::time::advance(Duration::from_secs(SUSPECT_S)).await;
        }
        docker.assert_clean().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_hangs_does_not_hold_others_up() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    docker.daemon.world().delay = Duration::from_secs(3600);
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    let start = Instant::now();
    docker.network("Leave", ids).await.unwrap();
    docker.daemon.world().delay = Duration::ZERO;
    docker.stop(&web).await;
    docker.remove(&network).await;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    assert!(start.elapsed() < 2 * LIMIT, "{:?}", start.elapsed());
    docker.assert_clean().await;
}

#[tokio::test]
async fn a_failed_removal_is_tried_again() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    docker.daemon.world().broken = Some(broken());
    docker.stop(&web).await;
    docker.remove(&network).await;
    assert!(!docker.daemon.world().is_clean());
    let error = docker.create(Create { id: "n2", ..Create::default() }).await.unwrap_err();
    assert!(error.contains("cannot reach the kernel: no memory"), "{error}");
    // Over a restart.
    let docker = docker.restart();
    docker.daemon.world().broken = None;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    docker.assert_clean().await;
}

/// Docker gives an address back also where its interface could not be removed.
#[tokio::test]
async fn an_address_stays_taken_until_its_link_is_gone() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    docker.daemon.world().stuck = Some(broken());
    docker.stop(&web).await;
    assert!(docker.daemon.world().links.contains_key("e1"));
    let other = docker.run(&network, Run { endpoint: "e2", ..Run::default() }).await.unwrap();
    assert_ne!(other.ip, web.ip);
    // Over a restart, and a try that fails again.
    let docker = docker.restart();
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    let ip = web.ip.split('/').next().unwrap();
    docker.address(&network.pool_id, ip, Value::Null).await.unwrap_err();
    docker.daemon.world().stuck = None;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    assert!(!docker.daemon.world().links.contains_key("e1"));
    let again = docker.run(&network, Run { endpoint: "e3", ip, ..Run::default() }).await.unwrap();
    assert_eq!(again.ip, web.ip);
    docker.stop(&again).await;
    docker.stop(&other).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn a_network_stays_until_its_last_link_is_gone() {
    let docker = Docker::new();
    let options = json!({"network": "shop"});
    let create = Create { id: "n1", options, subnet: "10.40.0.0/16", ..Create::default() };
    let network = docker.create(create).await.unwrap();
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    docker.daemon.world().stuck = Some(broken());
    docker.stop(&web).await;
    docker.remove(&network).await;
    assert_eq!(docker.daemon.world().networks.len(), 2);
    assert_eq!(docker.daemon.world().held.len(), 1);
    docker.daemon.world().stuck = None;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn a_join_that_fails_leaves_no_link_and_the_container_can_start_again() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let create = json!({
        "NetworkID": "n1", "EndpointID": "e1", "Interface": {"Address": "10.32.0.9/12"},
    });
    docker.network("CreateEndpoint", create).await.unwrap();
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    docker.daemon.world().broken = Some(broken());
    docker.network("Join", ids.clone()).await.unwrap_err();
    docker.daemon.world().broken = None;
    // Docker 29 sends Leave after a failed Join, too, perhaps twice.
    docker.network("Leave", ids.clone()).await.unwrap();
    docker.network("Leave", ids.clone()).await.unwrap();
    docker.network("Join", ids.clone()).await.unwrap();
    // A second Join that fails does not take the link of a running container away.
    docker.daemon.world().broken = Some(broken());
    docker.network("Join", ids.clone()).await.unwrap_err();
    docker.daemon.world().broken = None;
    assert_eq!(docker.daemon.world().links.len(), 1);
    docker.network("Leave", ids.clone()).await.unwrap();
    docker.network("DeleteEndpoint", ids).await.unwrap();
    docker.remove(&network).await;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    docker.assert_clean().await;
}

/// Engines before version 27 compare a range that they did not choose with the host's routes, and
/// ask for another one without limit.
#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_a_range_is_told_so() {
    let docker = Docker::new();
    // Asked once, when the driver is registered.
    docker.raw("IpamDriver.GetDefaultAddressSpaces", "").await;
    let request = || docker.ipam("RequestPool", json!({"AddressSpace": "weft", "Pool": ""}));
    let mut asked = 0;
    let error = loop {
        match request().await {
            Ok(_) => asked += 1,
            Err(error) => break error,
        }
        assert!(asked < 10, "endless");
    };
    assert!(error.contains(&format!("--subnet {READY_V4}")), "{error}");
    // The engine then releases what it holds. With a subnet there is no check.
    for _ in 0..asked {
        docker.ipam("ReleasePool", json!({"PoolID": "weft,weft,10.32.0.0/12"})).await.unwrap();
    }
    docker.assert_clean().await;
    let create = Create { id: "n1", subnet: READY_V4, ..Create::default() };
    let network = docker.create(create).await.unwrap();
    docker.remove(&network).await;
    // Networks that are made one after the other are no retries, however fast.
    for id in ["n2", "n3", "n4"] {
        let network = docker.create(Create { id, ..Create::default() }).await.unwrap();
        docker.remove(&network).await;
    }
    // Nor is a request a while later.
    let pool = request().await.unwrap();
    tokio::time::advance(Duration::from_secs(POOL_RETRY_S)).await;
    request().await.unwrap();
    for _ in 0..2 {
        docker.ipam("ReleasePool", json!({"PoolID": pool["PoolID"]})).await.unwrap();
    }
    // Engines from 27 on ask for the address spaces each time, and do not loop.
    for _ in 0..3 {
        docker.raw("IpamDriver.GetDefaultAddressSpaces", "").await;
    }
    for _ in 0..3 {
        request().await.unwrap();
    }
    for _ in 0..3 {
        docker.ipam("ReleasePool", json!({"PoolID": pool["PoolID"]})).await.unwrap();
    }
    docker.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn pools_are_stable_and_counted() {
    let docker = Docker::new();
    let request = |subnet: &str, range: &str, v6| json!({"AddressSpace": "weft", "Pool": subnet, "SubPool": range, "V6": v6});
    let v4 = docker.ipam("RequestPool", request(READY_V4, "", false)).await.unwrap();
    let again = docker.ipam("RequestPool", request(READY_V4, "", false)).await.unwrap();
    assert_eq!(v4, again);
    assert_eq!(v4["Data"], json!({GATEWAY: "10.32.0.1/12"}), "so that none is asked for");
    let v6 = docker.ipam("RequestPool", request("", "", true)).await.unwrap();
    assert_eq!(v6["Pool"], READY_V6);
    assert_eq!(v6["Data"], json!({GATEWAY: "fd57::1/64"}));
    let part = docker.ipam("RequestPool", request(READY_V4, "10.33.0.0/24", false)).await.unwrap();
    assert_ne!(part["PoolID"], v4["PoolID"]);
    for (subnet, range, v6, part) in [
        ("10.40.0.0/31", "", false, "prefix length"),
        ("10.0.0.0/7", "", false, "prefix length"),
        ("10.40.0.1/16", "", false, "not an IPv4 range"),
        ("fd57::/64", "", false, "not an IPv4 range"),
        ("10.40.0.0/16", "", true, "not an IPv6 range"),
        ("fd57::/127", "", true, "prefix length"),
        ("10.40.0.0/16", "10.41.0.0/24", false, "must lie in"),
        ("", "10.41.0.0/24", false, "needs --subnet"),
    ] {
        let error = docker.ipam("RequestPool", request(subnet, range, v6)).await.unwrap_err();
        assert!(error.contains(part), "{subnet} {range}: {error}");
    }
    let error =
        docker.ipam("RequestPool", json!({"AddressSpace": "LocalDefault"})).await.unwrap_err();
    assert!(error.contains("Weft's address space is weft"), "{error}");
    let pool = text(&v4["PoolID"]);
    // No container asks in this way before its network is created, so it is an auxiliary address.
    docker.address(&pool, "10.32.5.5", Value::Null).await.unwrap();
    assert!(docker.daemon.world().held.values().all(|held| held.shared));
    tokio::time::advance(Duration::from_secs(CREATION_S)).await;
    docker.address(&pool, "10.32.5.6", Value::Null).await.unwrap();
    assert!(docker.daemon.world().held.values().any(|held| !held.shared));
    // Released once, it is still there.
    docker.ipam("ReleasePool", json!({"PoolID": v4["PoolID"]})).await.unwrap();
    assert_eq!(docker.daemon.world().held.len(), 2);
    for id in [&v4, &v6, &part] {
        docker.ipam("ReleasePool", json!({"PoolID": id["PoolID"]})).await.unwrap();
    }
    docker.assert_clean().await;
}

#[tokio::test]
async fn an_exhausted_range_is_named_and_addresses_come_back() {
    let docker = Docker::new();
    let options = json!({"network": "shop"});
    let create = Create { id: "n1", options, subnet: "10.40.0.0/29", ..Create::default() };
    let network = docker.create(create).await.unwrap();
    let mut running = Vec::new();
    for number in 0..5 {
        let endpoint = format!("e{number}");
        let run = Run { endpoint: &endpoint, ..Run::default() };
        running.push(docker.run(&network, run).await.unwrap());
    }
    let run = Run { endpoint: "e9", ..Run::default() };
    let error = docker.run(&network, run.clone()).await.unwrap_err();
    assert!(error.contains("no free address in 10.40.0.0/29 of network shop"), "{error}");
    docker.stop(&running.remove(2)).await;
    running.push(docker.run(&network, run).await.unwrap());
    for container in &running {
        docker.stop(container).await;
    }
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// Fifty containers at once, each of which is also a second time on the way out.
#[tokio::test(start_paused = true)]
async fn many_containers_start_and_stop_at_once() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    docker.daemon.world().delay = Duration::from_millis(20);
    let start = |number: usize| {
        let (docker, network) = (docker.clone(), network.clone());
        tokio::spawn(async move {
            let endpoint = format!("e{number}");
            docker.run(&network, Run { endpoint: &endpoint, ..Run::default() }).await.unwrap()
        })
    };
    let starts: Vec<_> = (0..50).map(start).collect();
    let mut running = Vec::new();
    for start in starts {
        running.push(start.await.unwrap());
    }
    let addresses: BTreeSet<&String> = running.iter().map(|container| &container.ip).collect();
    let macs: BTreeSet<&String> = running.iter().map(|container| &container.mac).collect();
    assert_eq!((addresses.len(), macs.len()), (50, 50));
    assert_eq!(docker.daemon.world().links.len(), 50);
    let stops: Vec<_> = running
        .into_iter()
        .map(|container| {
            let docker = docker.clone();
            tokio::spawn(async move {
                tokio::join!(docker.stop(&container), docker.stop(&container));
            })
        })
        .collect();
    for stop in stops {
        stop.await.unwrap();
    }
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// Fifty containers make some 250 promises. On a disk that writes five in a second they share the writes.
#[tokio::test(start_paused = true)]
async fn a_slow_disk_holds_up_many_containers_once_and_not_each_in_turn() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    docker.daemon.world().disk_delay = Duration::from_millis(200);
    let start = |number: usize| {
        let (docker, network) = (docker.clone(), network.clone());
        tokio::spawn(async move {
            let endpoint = format!("e{number}");
            docker.run(&network, Run { endpoint: &endpoint, ..Run::default() }).await
        })
    };
    let begun = tokio::time::Instant::now();
    let starts: Vec<_> = (0..50).map(start).collect();
    let mut running = Vec::new();
    for start in starts {
        running.push(start.await.unwrap().unwrap());
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // A disk that is full refuses each of them, and takes back all that they hold.
    docker.daemon.world().disk_is_full = true;
    let starts: Vec<_> = (50..60).map(start).collect();
    for start in starts {
        let error = start.await.unwrap().unwrap_err();
        assert!(error.contains("cannot store"), "{error}");
    }
    assert_eq!(docker.daemon.world().links.len(), 50);
    docker.daemon.world().disk_is_full = false;
    for container in &running {
        docker.stop(container).await;
    }
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// An engine that goes on before it has an answer, as one that was restarted does.
#[tokio::test(start_paused = true)]
async fn calls_about_one_endpoint_run_one_after_the_other() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let create = json!({
        "NetworkID": "n1", "EndpointID": "e1", "Interface": {"Address": "10.32.0.9/12"},
    });
    docker.network("CreateEndpoint", create).await.unwrap();
    docker.daemon.world().delay = Duration::from_secs(1);
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    let leave = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        docker.network("Leave", ids.clone()).await
    };
    let (joined, left) = tokio::join!(docker.network("Join", ids.clone()), leave);
    joined.unwrap();
    left.unwrap();
    assert!(docker.daemon.world().links.is_empty());
    docker.remove(&network).await;
    docker.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_network_that_is_closed_and_opened_at_once_stays_open() {
    let docker = Docker::new();
    let options = json!({"network": "shop"});
    let create = |id| Create {
        id,
        options: options.clone(),
        ipam_options: options.clone(),
        subnet: "10.40.0.0/16",
        ..Create::default()
    };
    let first = docker.create(create("n1")).await.unwrap();
    docker.daemon.world().delay = Duration::from_secs(1);
    let second = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        docker.create(create("n2")).await
    };
    let ((), second) = tokio::join!(docker.remove(&first), second);
    let second = second.unwrap();
    assert_eq!(docker.daemon.world().networks.len(), 2);
    docker.daemon.world().delay = Duration::ZERO;
    docker.remove(&second).await;
    docker.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_network_that_is_asked_for_while_its_last_user_goes_stays_open() {
    let docker = Docker::new();
    let options = json!({"network": "shop"});
    let create = Create {
        id: "n1",
        options: options.clone(),
        ipam_options: options.clone(),
        subnet: "10.40.0.0/16",
        ..Create::default()
    };
    let network = docker.create(create).await.unwrap();
    docker.daemon.world().delay = Duration::from_secs(1);
    let other = json!({"Pool": "10.40.0.0/16", "SubPool": "10.40.7.0/24", "Options": options});
    let remove = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        docker.remove(&network).await;
    };
    let (pool, ()) = tokio::join!(docker.ipam("RequestPool", other), remove);
    assert_eq!(docker.daemon.world().networks.len(), 2);
    docker.ipam("ReleasePool", json!({"PoolID": pool.unwrap()["PoolID"]})).await.unwrap();
    docker.assert_clean().await;
}

/// A call that needs a network finds it in use, and is its only user when it ends.
#[tokio::test(start_paused = true)]
async fn a_network_that_is_asked_for_while_its_last_user_is_forgotten_stays_open() {
    let docker = Docker::new();
    let options = json!({"network": "shop"});
    let create = Create {
        id: "n1",
        options: options.clone(),
        ipam_options: options.clone(),
        subnet: "10.40.0.0/16",
        ..Create::default()
    };
    docker.create(create).await.unwrap();
    // Docker has lost it.
    let reconcile = async || {
        let mut listing = docker.daemon.world().listing();
        listing.networks = Some(BTreeMap::new());
        docker.plugin.reconcile(&listing).await
    };
    reconcile().await;
    tokio::time::advance(Duration::from_secs(SUSPECT_S)).await;
    docker.daemon.world().delay = Duration::from_secs(1);
    let other = json!({"Pool": "10.40.0.0/16", "SubPool": "10.40.7.0/24", "Options": options});
    let forget = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        reconcile().await
    };
    let (pool, _) = tokio::join!(docker.ipam("RequestPool", other), forget);
    assert_eq!(docker.daemon.world().networks.len(), 2);
    docker.ipam("ReleasePool", json!({"PoolID": pool.unwrap()["PoolID"]})).await.unwrap();
    docker.assert_clean().await;
}

/// The daemon limits all that it waits for.
#[tokio::test(start_paused = true)]
async fn a_reconciliation_that_is_given_up_leaves_nothing_begun() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    docker.daemon.world().broken = Some(broken());
    docker.stop(&web).await;
    docker.remove(&network).await;
    docker.daemon.world().broken = None;
    docker.daemon.world().delay = Duration::from_secs(3);
    let listing = docker.daemon.world().listing();
    let given_up = tokio::time::timeout(LIMIT / 10, docker.plugin.reconcile(&listing)).await;
    assert!(given_up.is_err());
    tokio::time::sleep(LIMIT).await;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    docker.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn reconciliation_leaves_calls_under_way_alone() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    docker.daemon.world().delay = Duration::from_secs(1);
    let run = docker.run(&network, Run { endpoint: "e1", ..Run::default() });
    let reconcile = async {
        for _ in 0..30 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let listing = docker.daemon.world().listing();
            docker.plugin.reconcile(&listing).await;
        }
    };
    let (web, ()) = tokio::join!(run, reconcile);
    let web = web.unwrap();
    assert_eq!(docker.daemon.world().links.len(), 1);
    assert_eq!(docker.daemon.world().held.len(), 1);
    docker.daemon.world().delay = Duration::ZERO;
    docker.stop(&web).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn more_calls_than_the_limit_are_still_answered_in_time() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    docker.daemon.world().delay = Duration::from_secs(25);
    let start = Instant::now();
    let calls: Vec<_> = (0..2 * CALLS_MAX)
        .map(|number| {
            let (docker, pool) = (docker.clone(), network.pool_id.clone());
            tokio::spawn(async move {
                if number % 2 == 0 {
                    docker.address(&pool, "", Value::Null).await.map(drop)
                } else {
                    docker.ipam("ReleasePool", json!({"PoolID": "x"})).await.map(drop)
                }
            })
        })
        .collect();
    for (number, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.unwrap().is_ok(), number % 2 == 1);
    }
    assert!(start.elapsed() < LIMIT);
    tokio::time::sleep(Duration::from_secs(200)).await;
    docker.daemon.world().delay = Duration::ZERO;
    docker.remove(&network).await;
    let listing = docker.daemon.world().listing();
    docker.plugin.reconcile(&listing).await;
    docker.assert_clean().await;
}

/// The bytes that an engine sends, over a real socket.
#[tokio::test]
async fn a_unix_socket_serves_the_engine() {
    let docker = Docker::new();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weft.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = tokio::spawn(serve(listener, docker.plugin.clone()));
    let stream = UnixStream::connect(&path).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    // One connection for several requests; the host is a path, as 20.10 sends it.
    for (method, body, key) in [
        ("Plugin.Activate", String::new(), "Implements"),
        ("IpamDriver.RequestPool", json!({"Pool": null, "Options": null}).to_string(), "PoolID"),
        ("IpamDriver.RequestPool", String::new(), "Error"),
        ("NetworkDriver.DiscoverNew", "x".repeat(100_000), ""),
        ("NetworkDriver.Join", String::new(), "Err"),
    ] {
        let request = hyper::Request::post(format!("/{method}"))
            .header("Host", "%2Frun%2Fdocker%2Fplugins%2Fweft.sock")
            .header("Accept", "application/vnd.docker.plugins.v1.2+json")
            .body(Full::<Bytes>::from(body))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.status(), 200, "{method}");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let answer: Value = serde_json::from_slice(&body).unwrap();
        assert!(key.is_empty() || answer.get(key).is_some(), "{method}: {answer}");
    }
    connection.abort();
    server.abort();
}
