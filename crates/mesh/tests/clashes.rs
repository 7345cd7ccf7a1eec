//! Networks of other hosts that clash with this host's, or that this release cannot read: found, listed and told.
#![allow(clippy::unwrap_used)]

mod common;
mod net;

use std::time::{Duration, Instant};

use common::{drain, founder, hold, id, link, on, restored, saved, shop, with_mtu};
use net::{RANGE, network_box};
use weft_mesh::{
    Change, Mesh, Message, NetworkClash, NetworkDefinition, NetworkError, NetworkOptions,
    OptionValue, Output, Vni, limits,
};

/// The clashes of a network of this host, as the status lists them.
fn listed(mesh: &Mesh, name: &str) -> Vec<NetworkClash> {
    let networks = mesh.networks().into_iter();
    let held = networks.filter(|it| it.here && it.definition.name == name);
    held.flat_map(|it| it.clashes).collect()
}

/// The clashes that are worth a line in the log.
fn told(mesh: &mut Mesh) -> Vec<NetworkClash> {
    let outputs = drain(mesh).into_iter();
    let clashes = outputs.filter_map(|output| match output {
        Output::Changed(Change::NetworkClash(clash)) => Some(clash),
        _ => None,
    });
    clashes.collect()
}

#[test]
fn a_network_clashes_with_one_of_its_name_and_with_one_of_its_vni_on_one_host() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    for network in [shop(), NetworkDefinition::new("web")] {
        mesh.create_network(now, network).unwrap();
    }
    let named = NetworkDefinition { vni: Vni(9), ..shop() };
    let numbered = NetworkDefinition { vni: shop().vni, ..NetworkDefinition::new("db") };
    hold(&mut mesh, now, 7, &[named, numbered, NetworkDefinition::new("other")]);
    let clashes = listed(&mesh, "shop");
    let one_name = |it: &&NetworkClash| matches!(it, NetworkClash::Definition { .. });
    let one_vni = |it: &&NetworkClash| matches!(it, NetworkClash::Vni { .. });
    assert_eq!(clashes.len(), 2, "{clashes:?}");
    assert!(clashes.iter().any(|it| one_name(&it)) && clashes.iter().any(|it| one_vni(&it)));
    assert_eq!(told(&mut mesh), clashes);
    assert_eq!(listed(&mesh, "web"), []);
}

#[test]
fn a_peer_causes_few_lines_about_clashes_however_often_its_list_changes() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    for peer in [7, 8] {
        link(&mut mesh, now, peer);
    }
    mesh.create_network(now, shop()).unwrap();
    drain(&mut mesh);
    let mut lines = 0;
    for n in 0..3 * limits::CLASHES_TOLD_PER_PEER_MAX {
        let theirs = with_mtu(1_300 + n as u16);
        if n % 10 == 0 {
            // A new link is no new account.
            link(&mut mesh, now, 7);
        }
        hold(&mut mesh, now, 7, std::slice::from_ref(&theirs));
        lines += told(&mut mesh).len();
        let clashes = listed(&mesh, "shop");
        let [NetworkClash::Definition { theirs: said, .. }] = &clashes[..] else {
            panic!("{clashes:?}")
        };
        assert_eq!(**said, theirs, "the status has the clash of now");
    }
    assert_eq!(lines, limits::CLASHES_TOLD_PER_PEER_MAX);
    hold(&mut mesh, now, 8, &[with_mtu(1_400)]);
    assert_eq!(told(&mut mesh).len(), 1, "another peer has its own account");
    hold(&mut mesh, now, 8, &[with_mtu(1_400)]);
    assert_eq!(told(&mut mesh), [], "a clash that lasts is told once");
    now += Duration::from_secs(limits::CLASHES_TOLD_PERIOD_S);
    hold(&mut mesh, now, 7, &[with_mtu(1_400)]);
    assert_eq!(told(&mut mesh).len(), 1);
}

/// Network `shop` with an option that this release does not know.
fn coloured() -> NetworkDefinition {
    let later = [("colour".to_owned(), OptionValue::Text("red".to_owned()))].into();
    let options = NetworkOptions { later, ..NetworkOptions::default() };
    NetworkDefinition { options, ..shop() }
}

/// A message with a list of networks, as a later release may write it.
fn read(networks: &str) -> Result<Message, serde_json::Error> {
    let text = format!(r#"{{"kind":"networks","first":true,"more":false,"networks":{networks}}}"#);
    serde_json::from_str(&text)
}

/// The networks that this host knows from others alone.
fn known(mesh: &Mesh) -> Vec<String> {
    let others = mesh.networks().into_iter().filter(|it| !it.here);
    let mut names: Vec<String> = others.map(|it| it.definition.name).collect();
    names.sort();
    names
}

#[test]
fn a_network_with_an_option_of_a_later_release_is_neither_created_nor_joined() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    let created = mesh.create_network(now, coloured()).unwrap_err();
    let option = "colour".to_owned();
    assert_eq!(created, NetworkError::UnknownOption { name: "shop".into(), option });
    let text = created.to_string();
    assert!(text.contains("colour") && text.contains("update Weft on this host"), "{text}");
    hold(&mut mesh, now, 7, &[coloured()]);
    assert_eq!(mesh.join_network(now, "shop"), Err(created));
    assert_eq!(known(&mesh), ["shop"]);
    let clash = mesh.create_network(now, shop()).unwrap_err().to_string();
    assert!(clash.contains(r#"colour (of a later release) is "red" there and none"#), "{clash}");
}

#[test]
fn nothing_of_a_network_passes_to_a_host_that_has_it_with_an_option_of_a_later_release() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, shop()).unwrap();
    mesh.set_local_endpoint(now, shop().vni, network_box(5, 1)).unwrap();
    link(&mut mesh, now, 7);
    let text = format!(r#"[{{"name":"shop","vni":{},"options":{{"colour":5}}}}]"#, shop().vni.0);
    mesh.handle_message(now, id(7), read(&text).unwrap()).unwrap();
    let (add, remove) = (vec![network_box(7, 1)], Vec::new());
    let theirs = Message::Endpoints { version: 1, full: true, more: false, add, remove };
    mesh.handle_message(now, id(7), on(shop().vni, theirs)).unwrap();
    assert_eq!(mesh.endpoints(shop().vni), [(network_box(5, 1), id(5))]);
    assert_eq!(mesh.network_peers(shop().vni), []);
    let outputs = drain(&mut mesh);
    let said = |it: &Output| matches!(it, Output::Send { message: Message::On { .. }, .. });
    assert!(!outputs.iter().any(said), "{outputs:?}");
    let clashes = listed(&mesh, "shop");
    let [clash @ NetworkClash::Definition { .. }] = &clashes[..] else { panic!("{clashes:?}") };
    let text = clash.to_string();
    assert!(text.contains("colour (of a later release) is 5 there and none here"), "{text}");
    let told =
        |it: &&Output| matches!(it, Output::Changed(Change::NetworkClash(it)) if it == clash);
    assert_eq!(outputs.iter().filter(told).count(), 1);
}

#[test]
fn entries_of_a_list_that_this_release_cannot_use_leave_the_others_as_they_are() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, NetworkDefinition::new("db")).unwrap();
    link(&mut mesh, now, 7);
    let long = "l".repeat(limits::LATER_OPTION_BYTES_MAX + 1);
    let range6 = r#""range6":"fd00::/64""#;
    let entries = [
        r#"{"name":"web","vni":1001,"options":{},"founding":[1]}"#.to_owned(),
        r#"{"name":"db","vni":1002,"range":"10.0.0.0/8,10.1.0.0/16","options":{}}"#.to_owned(),
        r#"{"name":"mail","vni":1003,"options":{"mtu":70000}}"#.to_owned(),
        r#"{"name":"small","vni":1004,"range":"10.0.0.0/30"}"#.to_owned(),
        r#"{"name":"rest","vni":1005,"resting":true,"options":5}"#.to_owned(),
        format!(r#"{{"name":"long","vni":1006,"options":{{"a":"{long}"}}}}"#),
        format!(r#"{{"name":"own6","vni":1007,"founding":{{"id":"{:032}",{range6}}}}}"#, 0),
        r#"{"name":"shop","vni":9277441,"options":{"internal":true}}"#.to_owned(),
    ];
    let list = format!("[{}]", entries.join(","));
    mesh.handle_message(now, id(7), read(&list).unwrap()).unwrap();
    assert_eq!(known(&mesh), ["db", "mail", "shop", "small", "web"]);
    assert_eq!(mesh.join_network(now, "shop"), Ok(shop().vni));
    for name in ["web", "mail"] {
        let error = mesh.join_network(now, name).unwrap_err();
        assert!(matches!(error, NetworkError::UnknownOption { .. }), "{error}");
    }
    let small = mesh.join_network(now, "small").unwrap_err();
    assert!(matches!(small, NetworkError::Unfit { .. }), "{small}");
    let text = listed(&mesh, "db")[0].to_string();
    let said = r#"range (of a later release) is "10.0.0.0/8,10.1.0.0/16" there and none here"#;
    assert!(text.contains(said) && text.contains("VNI is 1002 there"), "{text}");

    // An entry without a name or a VNI is none of any release.
    for bad in [r#"{"vni":9}"#, r#"{"name":"a"}"#, r#"{"name":"a","vni":"9"}"#, "5"] {
        assert!(read(&format!("[{bad}]")).is_err(), "{bad}");
    }
    for bad in [r#"{"name":"A","vni":9}"#, r#"{"name":"a","vni":1}"#] {
        let message = read(&format!("[{bad}]")).unwrap();
        assert!(mesh.handle_message(now, id(7), message).is_err(), "{bad}");
    }
    assert_eq!(known(&mesh), ["db", "mail", "small", "web"]);
}

/// A state that a later release wrote, before its user went back to this one.
#[test]
fn a_saved_network_with_an_option_of_a_later_release_is_dropped_and_named() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    for network in [with_mtu(1_400), NetworkDefinition::new("web")] {
        mesh.create_network(now, network).unwrap();
    }
    let saved = saved(&mut mesh).replace(r#"{"mtu":1400}"#, r#"{"mtu":1400,"colour":"red"}"#);
    assert!(saved.contains("colour"));
    let mut mesh = restored(now, RANGE, &saved);
    let held: Vec<&str> = mesh.held_networks().map(|it| it.name.as_str()).collect();
    assert_eq!(held, ["web"]);
    let outputs = drain(&mut mesh);
    let (name, option) = ("shop".to_owned(), "colour".to_owned());
    let named = Change::NetworkUnknown { name, vni: shop().vni, option };
    assert!(matches!(outputs[0], Output::Persist(_)), "{outputs:?}");
    assert!(outputs.contains(&Output::Changed(named)), "{outputs:?}");
}
