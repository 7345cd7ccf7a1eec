//! Networks and containers from their beginning to their end. The names in brackets are the cases of
//! moby's own suite of network plugins that a test mirrors.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::model::{READY_V4, READY_V6};
use super::super::names::NetworkName;
use super::super::state::{ListedNetwork, ListedPool, Listing, SUSPECT_S};
use super::{Create, Docker, Network, Run, text};

fn shop() -> Value {
    json!({"network": "shop"})
}

async fn ready(docker: &Docker) -> Network {
    docker.create(Create { id: "n1", ..Create::default() }).await.unwrap()
}

#[tokio::test]
async fn a_network_and_a_container_leave_nothing_behind() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    assert_eq!((network.pool.as_str(), network.gateway.as_str()), (READY_V4, "10.32.0.1/12"));
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    assert_eq!(web.ip, "10.32.0.2/12");
    // No gateway: the engine then adds its own bridge for the way out. The other range is on the
    // link only for a container that has an address of its family.
    let interface = json!({"SrcName": "vwde1", "DstPrefix": "eth"});
    assert_eq!(web.joined, json!({"InterfaceName": interface, "StaticRoutes": []}));
    let link = docker.daemon.world().links["e1"].clone();
    assert_eq!(link.mac.to_string(), web.mac);
    assert_eq!(link.addresses, ["10.32.0.2/12".parse().unwrap()]);
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    let info = docker.network("EndpointOperInfo", ids).await.unwrap();
    assert_eq!(info, json!({"Value": {"mac": web.mac}}));
    docker.stop(&web).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// [CustomIPAM, IPAMOptions] The same commands on a second host give other addresses of one range.
#[tokio::test]
async fn a_named_network_has_a_range_of_its_own() {
    let docker = Docker::new();
    let create = Create {
        id: "n1",
        options: shop(),
        ipam_options: shop(),
        subnet: "10.40.0.0/16",
        range: "10.40.9.0/24",
        ..Create::default()
    };
    let network = docker.create(create.clone()).await.unwrap();
    assert_eq!(network.pool_id, "weft,shop,10.40.0.0/16,10.40.9.0/24");
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    assert_eq!(web.ip, "10.40.9.1/16", "--ip-range");
    let link = docker.daemon.world().links["e1"].clone();
    assert_eq!(link.network.as_str(), "shop");
    // Once more, by its range alone, as a Compose file without IPAM options asks for it.
    let second = Create { id: "n2", ipam_options: Value::Null, range: "", ..create };
    let other = docker.create(second).await.unwrap();
    let db = docker.run(&other, Run { endpoint: "e2", ..Run::default() }).await.unwrap();
    assert_eq!(db.ip, "10.40.0.2/16");
    for running in [&web, &db] {
        docker.stop(running).await;
    }
    docker.remove(&network).await;
    assert!(docker.daemon.world().networks.len() == 2, "shop is in use");
    docker.remove(&other).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn a_subnet_without_a_network_becomes_the_network_that_create_names() {
    let docker = Docker::new();
    let create = Create {
        id: "n1",
        options: json!({"weft.network": "shop"}),
        subnet: "10.40.0.0/16",
        range: "10.40.1.0/24",
        gateway: "10.40.0.254",
        // Gateway and auxiliary addresses may lie outside --ip-range.
        aux: &["10.40.0.9", "10.40.1.1"],
        ..Create::default()
    };
    let network = docker.create(create).await.unwrap();
    let held: Vec<(String, bool)> = {
        let world = docker.daemon.world();
        world.held.values().map(|held| (held.address.to_string(), held.shared)).collect()
    };
    assert_eq!(held.len(), 3);
    for address in ["10.40.0.254", "10.40.0.9", "10.40.1.1"] {
        assert!(held.contains(&(address.to_owned(), true)), "{held:?}");
    }
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    assert_eq!(web.ip, "10.40.1.2/16");
    docker.stop(&web).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn a_name_alone_shares_the_range_of_the_ready_network() {
    let docker = Docker::new();
    let create = Create { id: "n1", options: shop(), ..Create::default() };
    let shop = docker.create(create).await.unwrap();
    let weft = docker.create(Create { id: "n2", ..Create::default() }).await.unwrap();
    assert_eq!(shop.pool_id, weft.pool_id);
    let one = docker.run(&shop, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    let two = docker.run(&weft, Run { endpoint: "e2", ..Run::default() }).await.unwrap();
    assert_ne!(one.ip, two.ip);
    let networks: Vec<String> =
        docker.daemon.world().links.values().map(|link| link.network.to_string()).collect();
    assert_eq!(networks, ["shop", "weft"]);
    docker.stop(&one).await;
    docker.remove(&shop).await;
    docker.stop(&two).await;
    docker.remove(&weft).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn a_network_without_a_name_is_refused_unless_its_range_is_the_ready_networks() {
    let docker = Docker::new();
    let own = Create { id: "n1", subnet: READY_V4, ..Create::default() };
    let network = docker.create(own).await.unwrap();
    let strange = Create { id: "n2", subnet: "10.40.0.0/16", ..Create::default() };
    let error = docker.create(strange).await.unwrap_err();
    assert!(error.contains("add -o network=NAME"), "{error}");
    // A name for the addresses alone is not enough either.
    let half =
        Create { id: "n2", ipam_options: shop(), subnet: "10.40.0.0/16", ..Create::default() };
    let error = docker.create(half).await.unwrap_err();
    assert!(error.contains("add -o network=NAME"), "{error}");
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// Addresses are asked for first, and nobody may change a network afterwards.
#[tokio::test]
async fn a_network_is_created_once_docker_has_said_whether_it_is_internal() {
    let docker = Docker::new();
    let subnet = "10.40.0.0/16";
    let request = json!({"AddressSpace": "weft", "Pool": subnet, "Options": shop(), "V6": false});
    let pool = docker.ipam("RequestPool", request).await.unwrap();
    let id = text(&pool["PoolID"]);
    assert_eq!(id, "weft,shop,10.40.0.0/16");
    assert_eq!(docker.daemon.world().networks.len(), 1, "the ready network alone");
    let error = docker.address(&id, "", Value::Null).await.unwrap_err();
    assert!(error.contains("belongs to no network"), "{error}");
    docker.ipam("ReleasePool", json!({"PoolID": id})).await.unwrap();
    docker.assert_clean().await;

    let both =
        Create { id: "n1", options: shop(), ipam_options: shop(), subnet, ..Create::default() };
    let other = Create { options: json!({"network": "blog"}), ..both.clone() };
    let error = docker.create(other).await.unwrap_err();
    assert!(error.contains("belongs to network shop, not to blog"), "{error}");
    docker.daemon.world().opened.clear();
    let network = docker.create(Create { internal: true, ..both }).await.unwrap();
    let said: Vec<Option<bool>> =
        docker.daemon.world().opened.iter().map(|request| request.internal).collect();
    assert_eq!(said, [None, Some(true)]);
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    assert_eq!(web.ip, "10.40.0.2/16");
    docker.stop(&web).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn two_halves_that_name_two_networks_are_refused() {
    let docker = Docker::new();
    let subnet = "10.40.0.0/16";
    let create = Create { id: "n1", options: shop(), subnet, ..Create::default() };
    let network = docker.create(create).await.unwrap();
    // The subnet alone means network shop.
    let other = json!({"network": "blog"});
    let clash = Create { id: "n2", options: other.clone(), subnet, ..Create::default() };
    let error = docker.create(clash).await.unwrap_err();
    assert!(error.contains("--ipam-opt network=blog"), "{error}");
    // Overlapping ranges of two networks: each has its own, since both halves name it.
    let overlap = Create {
        id: "n3",
        options: other.clone(),
        ipam_options: other,
        subnet,
        ..Create::default()
    };
    let blog = docker.create(overlap).await.unwrap();
    let one = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    let two = docker.run(&blog, Run { endpoint: "e2", ..Run::default() }).await.unwrap();
    assert_eq!(one.ip, two.ip);
    // In one container Linux would use one of them alone.
    let beside = Run { endpoint: "e3", sandbox: "e1", ..Run::default() };
    let error = docker.run(&blog, beside.clone()).await.unwrap_err();
    assert!(error.contains("on network shop already") && error.contains("network blog"), "{error}");
    let twice = Run { endpoint: "e5", sandbox: "e1", ..Run::default() };
    let error = docker.run(&network, twice).await.unwrap_err();
    assert!(error.contains("network shop of Weft's already, by another"), "{error}");
    docker.stop(&one).await;
    let moved = docker.run(&blog, beside).await.unwrap();
    let one = docker.run(&network, Run { endpoint: "e4", ..Run::default() }).await.unwrap();
    docker.stop(&moved).await;
    // A range that the network has not.
    let strange = Create {
        id: "n4",
        options: shop(),
        ipam_options: shop(),
        subnet: "10.41.0.0/16",
        ..Create::default()
    };
    let error = docker.create(strange).await.unwrap_err();
    assert!(error.contains("network shop cannot be used"), "{error}");
    for (running, network) in [(&one, &network), (&two, &blog)] {
        docker.stop(running).await;
        docker.remove(network).await;
    }
    docker.assert_clean().await;
}

#[tokio::test]
async fn dockers_own_ipam_is_refused_with_the_option_that_is_missing() {
    let docker = Docker::new();
    let request = |space: &str, options: Value| {
        json!({
            "NetworkID": "n1",
            "Options": {"com.docker.network.generic": options},
            "IPv4Data": [{
                "AddressSpace": space, "Pool": "172.18.0.0/16", "Gateway": "172.18.0.1/16",
            }],
            "IPv6Data": [],
        })
    };
    for space in ["LocalDefault", "GlobalDefault", "", "other"] {
        let error = docker.network("CreateNetwork", request(space, shop())).await.unwrap_err();
        assert!(error.contains("--ipam-driver weft"), "{error}");
    }
    let keeps_apart = json!({"network": "shop", "weft.ipam": "external"});
    docker.network("CreateNetwork", request("LocalDefault", keeps_apart)).await.unwrap();
    assert!(docker.daemon.world().opened.last().unwrap().external);
    let endpoint = json!({
        "NetworkID": "n1", "EndpointID": "e1",
        "Interface": {"Address": "172.18.0.2/16", "AddressIPv6": "", "MacAddress": ""},
        "Options": null,
    });
    docker.network("CreateEndpoint", endpoint).await.unwrap();
    assert!(docker.daemon.world().held.is_empty());
    docker.network("DeleteNetwork", json!({"NetworkID": "n1"})).await.unwrap();
    docker.assert_clean().await;
}

/// [NullIPAMDriver] The endpoint itself takes its addresses.
#[tokio::test]
async fn without_ipam_the_endpoint_has_addresses_of_the_network() {
    let docker = Docker::new();
    let request = json!({
        "NetworkID": "n1",
        "Options": {"com.docker.network.generic": {}, "com.docker.network.enable_ipv6": true},
        "IPv4Data": [{"AddressSpace": "null", "Pool": "0.0.0.0/0"}],
        "IPv6Data": null,
    });
    docker.network("CreateNetwork", request).await.unwrap();
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    let create = json!({"NetworkID": "n1", "EndpointID": "e1", "Interface": null, "Options": {}});
    let answer = docker.network("CreateEndpoint", create.clone()).await.unwrap();
    let interface = &answer["Interface"];
    assert_eq!(interface["Address"], "10.32.0.2/12");
    assert_eq!(interface["AddressIPv6"], "fd57::2/64");
    // Once more, as after a lost answer.
    assert_eq!(docker.network("CreateEndpoint", create).await.unwrap(), answer);
    docker.network("Join", ids.clone()).await.unwrap();
    docker.network("DeleteEndpoint", ids).await.unwrap();
    docker.network("DeleteNetwork", json!({"NetworkID": "n1"})).await.unwrap();
    docker.assert_clean().await;
}

/// [DriverOptions] Options that Weft does not know are refused by name.
#[tokio::test]
async fn unknown_options_are_refused_by_name() {
    let docker = Docker::new();
    for option in ["weft.gateway", "com.docker.network.driver.mtu", "opt1", "Network"] {
        let options = json!({"network": "shop", option: "x"});
        let create = Create { id: "n1", options, subnet: "10.40.0.0/16", ..Create::default() };
        let error = docker.create(create).await.unwrap_err();
        assert!(error.contains(&format!("-o {option} is unknown")), "{error}");
        let ipam_options = json!({option: "x"});
        let create = Create { id: "n1", ipam_options, ..Create::default() };
        let error = docker.create(create).await.unwrap_err();
        assert!(error.contains(&format!("--ipam-opt {option} is unknown")), "{error}");
    }
    for (options, part) in [
        (json!({"network": "Shop"}), "lower-case"),
        (json!({"network": ""}), "1 to 63"),
        (json!({"network": "a", "weft.network": "b"}), "two networks, a and b"),
        (json!({"network": "a", "weft.ipam": "none"}), "its only value is external"),
    ] {
        let create = Create { id: "n1", options, subnet: "10.40.0.0/16", ..Create::default() };
        let error = docker.create(create).await.unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let network = ready(&docker).await;
    let request = json!({
        "NetworkID": "n1", "EndpointID": "e1", "Interface": {}, "Options": {"weft.qos": "gold"},
    });
    let error = docker.network("CreateEndpoint", request).await.unwrap_err();
    assert!(error.contains("driver_opts weft.qos is unknown"), "{error}");
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// [MacInspect, ConnectWithMac] A given address is used as it is.
#[tokio::test]
async fn a_mac_address_is_given_or_made() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let given = "02:42:ac:11:00:02";
    let run = Run { endpoint: "e1", mac: given, ..Run::default() };
    let one = docker.run(&network, run).await.unwrap();
    assert_eq!(docker.daemon.world().links["e1"].mac.to_string(), given);
    // Only among the options, in base64.
    let request = json!({
        "NetworkID": "n1", "EndpointID": "e2", "Interface": {"Address": "10.32.0.9/12"},
        "Options": {"com.docker.network.endpoint.macaddress": "AkKsEQAD"},
    });
    let answer = docker.network("CreateEndpoint", request).await.unwrap();
    assert_eq!(answer, json!({"Interface": {"MacAddress": "02:42:ac:11:00:03"}}));
    let three = docker.run(&network, Run { endpoint: "e3", ..Run::default() }).await.unwrap();
    let first = u8::from_str_radix(three.mac.get(..2).unwrap(), 16).unwrap();
    assert_eq!(first & 3, 2, "locally administered and unicast");
    docker.stop(&one).await;
    docker.stop(&three).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// [ConnectPreferredIP, ConnectPreferredIPStoppedContainer]
#[tokio::test]
async fn explicit_addresses_are_held_once() {
    let docker = Docker::new();
    let create = Create { id: "n1", v6: Some(READY_V6), ..Create::default() };
    let network = docker.create(create).await.unwrap();
    let (ip, ip6) = ("10.32.1.1", "fd57::77");
    let run = Run { endpoint: "e1", name: "web", ip, ip6, ..Run::default() };
    let web = docker.run(&network, run.clone()).await.unwrap();
    assert_eq!((web.ip.as_str(), web.ip6.as_deref()), ("10.32.1.1/12", Some("fd57::77/64")));
    let error =
        docker.run(&network, Run { endpoint: "e2", name: "db", ..run.clone() }).await.unwrap_err();
    assert!(error.contains("address 10.32.1.1 is in use"), "{error}");
    // The same container again: Docker 29 tells the name, and has lost its record.
    let replayed = json!({"com.docker.network.endpoint.name": "web"});
    let again = docker.address(&network.pool_id, ip, replayed).await.unwrap();
    assert_eq!(again, "10.32.1.1/12");
    for (address, part) in [
        ("10.48.0.1", "not one for a container"),
        ("10.32.0.0", "not one for a container"),
        ("10.47.255.255", "not one for a container"),
        ("fd57::1", "not one for a container"),
        ("10.32.0.1", "in use"),
        ("10.32.1", "not an IP address"),
        ("10.32.1.1/12", "not an IP address"),
    ] {
        let run = Run { endpoint: "e3", name: "x", ip: address, ..Run::default() };
        let error = docker.run(&network, run).await.unwrap_err();
        assert!(error.contains(part), "{address}: {error}");
    }
    docker.stop(&web).await;
    let web = docker.run(&network, run).await.unwrap();
    docker.stop(&web).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// Before Docker 29 an auxiliary address and `--ip` look the same; only the former is shared.
#[tokio::test]
async fn an_explicit_address_is_of_one_container_once_the_network_stands() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let run = |endpoint, ip| Run { endpoint, ip, ..Run::default() };
    let one = docker.run(&network, run("e1", "10.32.1.1")).await.unwrap();
    docker.run(&network, run("e2", "10.32.1.1")).await.unwrap_err();
    // A network of the same pool that is refused changes nothing.
    let options = json!({"opt1": "x"});
    docker.create(Create { id: "n2", options, ..Create::default() }).await.unwrap_err();
    let two = docker.run(&network, run("e2", "10.32.1.2")).await.unwrap();
    assert!(docker.daemon.world().held.values().all(|held| !held.shared));
    docker.stop(&one).await;
    docker.stop(&two).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// [InspectCreatedContainer, AnonymousEndpoint, FlagAlias] Names do not reach the plugin.
#[tokio::test]
async fn a_stopped_container_has_no_endpoint_and_facts_of_none_are_empty() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    let info = docker.network("EndpointOperInfo", ids.clone()).await.unwrap();
    assert_eq!(info, json!({"Value": {}}));
    let create = json!({
        "NetworkID": "n1", "EndpointID": "e1", "Interface": {"Address": "10.32.0.9/12"},
        "Options": {"com.docker.network.endpoint.ifname": "web0"},
    });
    docker.network("CreateEndpoint", create).await.unwrap();
    let info = docker.network("EndpointOperInfo", ids).await.unwrap();
    assert_eq!(info, json!({"Value": {}}), "created, not joined");
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// [RestartWithMultipleNetworks, ConnectDisconnectToStoppedContainer]
#[tokio::test]
async fn a_container_on_several_networks_restarts() {
    let docker = Docker::new();
    let first = ready(&docker).await;
    let subnet = "10.40.0.0/16";
    let create = Create { id: "n2", options: shop(), subnet, internal: true, ..Create::default() };
    let second = docker.create(create).await.unwrap();
    assert!(docker.daemon.world().opened.iter().any(|request| request.internal == Some(true)));
    for round in 0..3 {
        let (one, two) = (format!("a{round}"), format!("b{round}"));
        let one = docker.run(&first, Run { endpoint: &one, ..Run::default() }).await.unwrap();
        let two = docker.run(&second, Run { endpoint: &two, ..Run::default() }).await.unwrap();
        assert!(two.joined.get("Gateway").is_none(), "--internal");
        docker.stop(&one).await;
        docker.stop(&two).await;
    }
    docker.remove(&first).await;
    docker.remove(&second).await;
    docker.assert_clean().await;
}

/// [DriverUngracefulRestart, MultipleNetworksGracefulDaemonRestart,
/// MultipleNetworksUngracefulDaemonRestart] Nothing is replayed to the plugin.
#[tokio::test]
async fn networks_and_endpoints_outlive_the_plugin() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    let docker = docker.restart();
    let ids = json!({"NetworkID": "n1", "EndpointID": "e1"});
    // A Join whose answer was lost comes again.
    let joined = docker.network("Join", ids).await.unwrap();
    assert_eq!(joined, web.joined);
    let db = docker.run(&network, Run { endpoint: "e2", ..Run::default() }).await.unwrap();
    assert_ne!(db.ip, web.ip);
    let docker = docker.restart();
    docker.stop(&web).await;
    docker.stop(&db).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// The engine was killed: it gives addresses back without Leave and DeleteEndpoint.
#[tokio::test]
async fn an_endpoint_goes_with_its_address() {
    let docker = Docker::new();
    let create = Create { id: "n1", v6: Some(READY_V6), ..Create::default() };
    let network = docker.create(create).await.unwrap();
    let old = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    let kept = docker.run(&network, Run { endpoint: "e2", ..Run::default() }).await.unwrap();
    let address = old.ip.split('/').next();
    let request = json!({"PoolID": network.pool_id, "Address": address});
    docker.ipam("ReleaseAddress", request).await.unwrap();
    // Another host may give the address at once, so no peer may believe that it is here.
    let links: Vec<String> = docker.daemon.world().links.keys().cloned().collect();
    assert_eq!(links, ["e2"]);
    docker.free(&old).await;
    let new = docker.run(&network, Run { endpoint: "e3", ..Run::default() }).await.unwrap();
    assert_eq!((&new.ip, &new.ip6), (&old.ip, &old.ip6));
    docker.stop(&new).await;
    docker.stop(&kept).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

/// The same with another IPAM driver, whose addresses the plugin does not see come back.
#[tokio::test]
async fn a_forgotten_endpoint_gives_way_to_one_with_its_address() {
    let docker = Docker::new();
    let options = json!({"network": "shop", "weft.ipam": "external"});
    let request = json!({
        "NetworkID": "n1", "Options": {"com.docker.network.generic": options},
        "IPv4Data": [{"AddressSpace": "LocalDefault", "Pool": "172.18.0.0/16"}],
    });
    docker.network("CreateNetwork", request).await.unwrap();
    for endpoint in ["e1", "e2"] {
        let ids = json!({"NetworkID": "n1", "EndpointID": endpoint});
        let mut create = ids.clone();
        create["Interface"] = json!({"Address": "172.18.0.2/16"});
        docker.network("CreateEndpoint", create).await.unwrap();
        docker.network("Join", ids).await.unwrap();
        let links: Vec<String> = docker.daemon.world().links.keys().cloned().collect();
        assert_eq!(links, [endpoint]);
    }
    docker.network("DeleteNetwork", json!({"NetworkID": "n1"})).await.unwrap();
    docker.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn reconciliation_removes_things_that_docker_does_not_list() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let kept = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    let lost = docker.run(&network, Run { endpoint: "e2", ..Run::default() }).await.unwrap();
    // A pool that the engine asked for twice, and an address whose answer was lost.
    docker.ipam("RequestPool", json!({"Pool": READY_V4})).await.unwrap();
    docker.address(&network.pool_id, "10.33.0.1", json!({"x": "y"})).await.unwrap();
    let listed = |endpoints: &[(&str, &str)]| {
        let endpoints = endpoints.iter().map(|(id, ip)| {
            let ip = ip.split('/').next().unwrap().parse().unwrap();
            ((*id).to_owned(), vec![ip])
        });
        let network = ListedNetwork {
            pools: vec![ListedPool { subnet: READY_V4.parse().unwrap(), range: None }],
            ipam_network: None,
            driver: true,
            endpoints: endpoints.collect(),
        };
        BTreeMap::from([("n1".to_owned(), network)])
    };
    let reconcile = async |networks| {
        let listing = Listing { networks, ..docker.daemon.world().listing() };
        docker.plugin.reconcile(&listing).await
    };
    let truth = listed(&[("e1", &kept.ip)]);
    let one = reconcile(Some(truth.clone())).await;
    assert_eq!(one, Default::default());
    assert_eq!(docker.daemon.world().links.len(), 2, "a list may be a little old");
    tokio::time::advance(Duration::from_secs(SUSPECT_S)).await;
    // Docker does not answer: nothing is removed.
    reconcile(None).await;
    assert_eq!(docker.daemon.world().links.len(), 2);
    // It may have listed anything in between, so the time starts again.
    reconcile(Some(truth.clone())).await;
    assert_eq!(docker.daemon.world().links.len(), 2);
    tokio::time::advance(Duration::from_secs(SUSPECT_S)).await;
    // Listed once more, as here, the time starts again, too.
    reconcile(Some(listed(&[("e1", &kept.ip), ("e2", &lost.ip)]))).await;
    reconcile(Some(truth.clone())).await;
    assert_eq!(docker.daemon.world().links.len(), 2);
    tokio::time::advance(Duration::from_secs(SUSPECT_S)).await;
    reconcile(Some(truth.clone())).await;
    assert_eq!(docker.daemon.world().links.len(), 1);
    assert_eq!(docker.daemon.world().held.len(), 1);
    // A link that is lost and a network without a record can only be named.
    docker.daemon.world().links.clear();
    let mut strange = truth;
    strange.insert("n9".to_owned(), ListedNetwork { driver: true, ..ListedNetwork::default() });
    let named = reconcile(Some(strange)).await;
    assert_eq!(named.unknown_networks, ["n9".to_owned()].into());
    assert_eq!(named.missing_links, ["e1".to_owned()].into());
    docker.stop(&kept).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}

#[tokio::test]
async fn links_and_owners_of_a_lost_state_go_once_docker_has_nothing_of_it() {
    let docker = Docker::new();
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    // The disk was restored to a state from before, with another instance.
    docker.daemon.world().disk = "{}".to_owned();
    let docker = docker.restart();
    let endpoints = BTreeMap::from([("e1".to_owned(), Vec::new())]);
    let running = ListedNetwork { driver: true, endpoints, ..ListedNetwork::default() };
    for networks in [None, Some(BTreeMap::from([("n1".to_owned(), running)]))] {
        let listing = Listing { networks, ..docker.daemon.world().listing() };
        docker.plugin.reconcile(&listing).await;
        let world = docker.daemon.world();
        assert_eq!((world.held.len(), world.links.len()), (1, 1), "its container may be running");
    }
    let listing = Listing { networks: Some(BTreeMap::new()), ..docker.daemon.world().listing() };
    docker.plugin.reconcile(&listing).await;
    docker.assert_clean().await;
    // Calls about what is unknown: giving back succeeds.
    docker.stop(&web).await;
    docker.remove(&network).await;
    let error = docker.run(&network, Run { endpoint: "e2", ..Run::default() }).await.unwrap_err();
    assert!(error.contains("no record of the address pool"), "{error}");
    docker.assert_clean().await;
}

#[tokio::test]
async fn further_ranges_of_a_network_are_on_the_link() {
    let docker = Docker::new();
    let name: NetworkName = "weft".parse().unwrap();
    let more = "10.200.0.0/16";
    docker.daemon.world().networks.get_mut(&name).unwrap().ranges.push(more.parse().unwrap());
    let network = ready(&docker).await;
    let web = docker.run(&network, Run { endpoint: "e1", ..Run::default() }).await.unwrap();
    let route = json!({"Destination": more, "RouteType": 1, "NextHop": ""});
    assert_eq!(web.joined["StaticRoutes"], json!([route]));
    assert_eq!(text(&web.joined["InterfaceName"]["DstPrefix"]), "eth");
    docker.stop(&web).await;
    docker.remove(&network).await;
    docker.assert_clean().await;
}
