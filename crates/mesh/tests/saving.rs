//! While a state is being written: what relies on it waits, and news of endpoints does not.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Instant;

use common::{change, container, drain, founder, hold, id, link, on, sent, shop, whole};
use weft_mesh::{Mesh, Message, NameRecord, Output, Vni};

/// A host that writes its state, since it has given an address.
fn saving(now: Instant) -> Mesh {
    let mut mesh = founder(now, "10.9.0.0/24");
    mesh.create_network(now, shop()).unwrap();
    link(&mut mesh, now, 7);
    mesh.handle_message(now, id(7), whole(1, 1)).unwrap();
    drain(&mut mesh);
    mesh.allocate(now, Vni::WEFT, "a");
    while !matches!(mesh.poll_output(), Some(Output::Persist(_))) {}
    mesh
}

fn passing(mesh: &mut Mesh) -> Vec<Output> {
    std::iter::from_fn(|| mesh.poll_output_while_saving()).collect()
}

#[test]
fn news_of_endpoints_goes_both_ways_and_an_answer_waits() {
    let now = Instant::now();
    let mut mesh = saving(now);
    mesh.allocate(now, Vni::WEFT, "b");
    mesh.handle_message(now, id(7), change(2, 2)).unwrap();
    mesh.handle_message(now, id(7), Message::BarrierRequest { number: 5 }).unwrap();
    let outputs = passing(&mut mesh);
    assert!(matches!(outputs[0], Output::Endpoints { .. }), "{outputs:?}");
    assert_eq!(sent(&outputs, 7), [Message::BarrierReply { number: 5 }]);
    let name = NameRecord {
        name: "db".to_owned(),
        network: "weft".to_owned(),
        addresses: vec!["192.0.2.1".parse().unwrap()],
        ports: Vec::new(),
        is_client: false,
    };
    mesh.set_local_names(vec![name.clone()]).unwrap();
    let names = Message::Names { first: true, more: false, names: vec![name] };
    assert_eq!(sent(&passing(&mut mesh), 7), [names]);
    mesh.set_local_endpoint(now, Vni::WEFT, container(9)).unwrap();
    assert_eq!(sent(&passing(&mut mesh), 7), [change(1, 9)]);

    mesh.handle_saved(now, Ok(()));
    let kinds = |output: &Output| match output {
        Output::Answer { .. } => Some("answer"),
        Output::Persist(_) => Some("state"),
        _ => None,
    };
    let rest: Vec<&str> = drain(&mut mesh).iter().filter_map(kinds).collect();
    assert_eq!(rest, ["answer", "state", "answer"]);
}

#[test]
fn a_greeting_keeps_its_order() {
    let now = Instant::now();
    let mut mesh = saving(now);
    let vni = shop().vni;
    // The greeting says which mesh this is, and which networks it has.
    link(&mut mesh, now, 8);
    hold(&mut mesh, now, 8, &[shop()]);
    mesh.set_local_endpoint(now, vni, container(9)).unwrap();
    assert_eq!(sent(&passing(&mut mesh), 8), []);
    // As does the whole set that a peer asks for.
    mesh.handle_message(now, id(7), Message::EndpointsRequest).unwrap();
    mesh.set_local_endpoint(now, Vni::WEFT, container(10)).unwrap();
    assert_eq!(sent(&passing(&mut mesh), 7), []);
    mesh.handle_saved(now, Ok(()));
    let outputs = drain(&mut mesh);
    let to_seven = sent(&outputs, 7);
    let is_whole = |it: &Message| matches!(it, Message::Endpoints { full: true, .. });
    let whole_set = to_seven.iter().position(is_whole);
    assert!(whole_set.is_some() && whole_set < to_seven.iter().position(|it| *it == change(1, 10)));
    let all = sent(&outputs, 8);
    let at = |is_meant: &dyn Fn(&Message) -> bool| all.iter().position(is_meant).unwrap();
    let networks = at(&|it| matches!(it, Message::Networks { .. }));
    assert!(networks < at(&|it| *it == on(vni, change(1, 9)) || *it == on(vni, whole(1, 9))));
}

#[test]
fn a_link_that_ends_takes_its_messages_along() {
    let now = Instant::now();
    let mut mesh = saving(now);
    link(&mut mesh, now, 8);
    passing(&mut mesh);
    mesh.handle_link_down(now, id(8));
    mesh.set_local_endpoint(now, Vni::WEFT, container(9)).unwrap();
    let outputs = passing(&mut mesh);
    assert_eq!((sent(&outputs, 7).last(), sent(&outputs, 8)), (Some(&change(1, 9)), vec![]));
    mesh.handle_saved(now, Ok(()));
    assert_eq!(sent(&drain(&mut mesh), 8), []);
}
