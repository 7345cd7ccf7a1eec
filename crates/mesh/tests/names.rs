//! Names for DNS: told whole, replaced whole, and gone with their host.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::{drain, founder, id, link};
use weft_mesh::{EndpointInfo, Mac, Mesh, Message, NameRecord, Output, Vni, limits};

fn name(name: &str, address: &str) -> NameRecord {
    NameRecord {
        name: name.to_owned(),
        network: "weft".to_owned(),
        addresses: vec![address.parse().unwrap()],
        ports: Vec::new(),
        is_client: false,
    }
}

#[test]
fn names_given_by_hand_are_told_and_go_with_their_host() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    drain(&mut mesh);
    mesh.set_local_names(vec![name("db", "192.0.2.1")]).unwrap();
    let told = drain(&mut mesh);
    let Some(Output::Send { peer, message }) = told.first() else { panic!("{told:?}") };
    let names = vec![name("db", "192.0.2.1")];
    assert_eq!((*peer, message), (id(7), &Message::Names { first: true, more: false, names }));
    mesh.set_local_names(vec![name("db", "192.0.2.1")]).unwrap();
    assert_eq!(drain(&mut mesh), [], "the same names are not told again");
    assert!(mesh.set_local_names(vec![name("d b", "192.0.2.1")]).is_err());

    let of_peer = |mesh: &Mesh| {
        let hosts = mesh.host_names();
        hosts
            .into_iter()
            .find(|host| host.peer == id(7))
            .map(|host| (host.names, host.unlinked_since))
    };
    let revision = mesh.names_revision();
    let part = |first, more, text: &str| {
        let names = vec![name(text, "192.0.2.2")];
        Message::Names { first, more, names }
    };
    mesh.handle_message(now, id(7), part(true, true, "old")).unwrap();
    mesh.handle_message(now, id(7), part(true, true, "a")).unwrap();
    assert_eq!(mesh.names_revision(), revision, "half a set changes nothing");
    mesh.handle_message(now, id(7), part(false, false, "b")).unwrap();
    assert!(mesh.names_revision() > revision);
    let whole = vec![name("a", "192.0.2.2"), name("b", "192.0.2.2")];
    assert_eq!(of_peer(&mesh), Some((whole.clone(), None)));

    mesh.handle_link_down(now, id(7));
    assert_eq!(of_peer(&mesh), Some((whole, Some(now))));
    mesh.handle_timeout(now + Duration::from_secs(limits::ENDPOINT_GRACE_S));
    assert_eq!(of_peer(&mesh), None);
    link(&mut mesh, now, 7);
    mesh.handle_message(now, id(7), part(true, false, "new")).unwrap();
    assert_eq!(of_peer(&mesh), Some((vec![name("new", "192.0.2.2")], None)));
}

#[test]
fn the_names_of_all_are_there_once_each_host_has_told_its_own() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    assert!(mesh.has_names_of_all(), "there is no other host");
    link(&mut mesh, now, 7);
    assert!(!mesh.has_names_of_all());
    let endpoints = |more| Message::Endpoints {
        version: 1,
        full: true,
        more,
        add: Vec::new(),
        remove: Vec::new(),
    };
    mesh.handle_message(now, id(7), endpoints(true)).unwrap();
    assert!(!mesh.has_names_of_all(), "half a set");
    mesh.handle_message(now, id(7), endpoints(false)).unwrap();
    assert!(mesh.has_names_of_all());
    mesh.handle_link_down(now, id(7));
    assert!(!mesh.has_names_of_all());
}

#[test]
fn aliases_are_left_out_where_there_are_none_and_unknown_to_older_hosts() {
    let endpoint = |aliases: &[&str]| EndpointInfo {
        container: "box".to_owned(),
        name: "box".to_owned(),
        aliases: aliases.iter().map(|it| (*it).to_owned()).collect(),
        mac: Mac([2, 0, 0, 0, 0, 1]),
        addresses: Vec::new(),
    };
    let text = serde_json::to_string(&endpoint(&[])).unwrap();
    assert!(!text.contains("aliases"), "{text}");
    assert_eq!(serde_json::from_str::<EndpointInfo>(&text).unwrap(), endpoint(&[]));
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    mesh.set_local_endpoint(now, Vni::WEFT, endpoint(&["web", "web.shop"])).unwrap();
    for bad in [&[""][..], &["a b"], &["a"; limits::ALIASES_PER_ENDPOINT_MAX + 1]] {
        assert!(mesh.set_local_endpoint(now, Vni::WEFT, endpoint(bad)).is_err(), "{bad:?}");
    }
}
