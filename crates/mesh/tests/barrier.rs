//! Barriers: a host hears when the engines of others know what it has announced.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Instant;

use common::{
    change, container, drain, founder, hold, id, link, link_older, on, sent, shop, whole,
};
use weft_mesh::{Mesh, Message, Output, Ticket, Vni, limits};

fn request(ticket: Ticket) -> Message {
    Message::BarrierRequest { number: ticket.0 }
}

/// A peer answers; whether that passes the barrier.
fn passes(mesh: &mut Mesh, peer: u8, ticket: Ticket) -> bool {
    let reply = Message::BarrierReply { number: ticket.0 };
    mesh.handle_message(Instant::now(), id(peer), reply).unwrap();
    drain(mesh).contains(&Output::BarrierPassed { ticket })
}

#[test]
fn a_barrier_is_passed_once_each_linked_host_has_answered() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    let alone = mesh.start_barrier(Vni::WEFT);
    assert!(drain(&mut mesh).contains(&Output::BarrierPassed { ticket: alone }));
    link(&mut mesh, now, 7);
    link(&mut mesh, now, 8);
    link_older(&mut mesh, now, 9);
    drain(&mut mesh);
    mesh.set_local_endpoint(now, Vni::WEFT, container(1)).unwrap();
    let ticket = mesh.start_barrier(Vni::WEFT);
    let outputs = drain(&mut mesh);
    assert_eq!(sent(&outputs, 7), [change(1, 1), request(ticket)], "in this order");
    assert_eq!(sent(&outputs, 9), [change(1, 1)], "an earlier release does not answer");
    assert!(!passes(&mut mesh, 7, ticket));
    assert!(!passes(&mut mesh, 7, ticket), "one host answers for itself alone");
    assert!(!passes(&mut mesh, 8, Ticket(ticket.0 ^ 1)), "nobody asked that");
    assert!(passes(&mut mesh, 8, ticket));

    let ticket = mesh.start_barrier(Vni::WEFT);
    assert!(!passes(&mut mesh, 7, ticket));
    mesh.handle_link_down(now, id(8));
    assert!(drain(&mut mesh).contains(&Output::BarrierPassed { ticket }));
}

#[test]
fn a_host_that_was_late_is_not_waited_for_until_it_answers() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    link(&mut mesh, now, 8);
    drain(&mut mesh);
    let late = mesh.start_barrier(Vni::WEFT);
    assert!(!passes(&mut mesh, 7, late));
    assert_eq!(mesh.end_barrier(late), [id(8)]);
    assert_eq!(mesh.end_barrier(late), []);
    let next = mesh.start_barrier(Vni::WEFT);
    assert!(passes(&mut mesh, 7, next));
    assert!(!passes(&mut mesh, 8, late), "it is over");
    let next = mesh.start_barrier(Vni::WEFT);
    assert!(!passes(&mut mesh, 7, next));
    assert!(passes(&mut mesh, 8, next), "it has answered since");
}

#[test]
fn a_host_answers_once_its_engines_are_told() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    drain(&mut mesh);
    for message in [whole(1, 1), change(2, 2), Message::BarrierRequest { number: 5 }] {
        mesh.handle_message(now, id(7), message).unwrap();
    }
    let outputs = drain(&mut mesh);
    let engines = outputs.iter().rposition(|it| matches!(it, Output::Endpoints { .. }));
    let message = Message::BarrierReply { number: 5 };
    assert!(message.is_barrier_reply() && on(Vni(5), message.clone()).is_barrier_reply());
    let answers =
        outputs.iter().position(|it| *it == Output::Send { peer: id(7), message: message.clone() });
    assert!(engines.is_some() && answers > engines, "{outputs:?}");
}

#[test]
fn on_a_network_only_hosts_that_hold_it_are_asked() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    mesh.create_network(now, shop()).unwrap();
    let vni = shop().vni;
    link(&mut mesh, now, 7);
    link(&mut mesh, now, 8);
    hold(&mut mesh, now, 7, &[shop()]);
    hold(&mut mesh, now, 8, &[]);
    drain(&mut mesh);
    let ticket = mesh.start_barrier(vni);
    let outputs = drain(&mut mesh);
    assert_eq!(sent(&outputs, 7), [on(vni, request(ticket))]);
    assert_eq!(sent(&outputs, 8), []);
    let reply = Message::BarrierReply { number: ticket.0 };
    mesh.handle_message(now, id(7), on(vni, reply)).unwrap();
    assert!(drain(&mut mesh).contains(&Output::BarrierPassed { ticket }));
}

#[test]
fn too_many_barriers_wait_for_nobody() {
    let now = Instant::now();
    let mut mesh = founder(now, "10.9.0.0/24");
    link(&mut mesh, now, 7);
    let passed = |mesh: &mut Mesh| {
        let ticket = mesh.start_barrier(Vni::WEFT);
        drain(mesh).contains(&Output::BarrierPassed { ticket })
    };
    assert!((0..limits::BARRIERS_MAX).all(|_| !passed(&mut mesh)));
    assert!(passed(&mut mesh));
}
