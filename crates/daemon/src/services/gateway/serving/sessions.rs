//! What is done with sessions, and where: here, on a thread, or after the device has done its part.

use std::sync::Arc;
use std::time::Instant;

use weft_openvpn::messages::{AuthFailure, Message};
use weft_openvpn::session::{Acceptance, Dropped, Session, SessionError};

use super::{Serving, login};
use crate::services::gateway::client::Todo;
use crate::services::gateway::device::{KeyChange, NewPeer};

/// A session that comes back from a thread, or after the device has done what it asked for.
pub(super) struct Done {
    pub(super) number: u32,
    /// `None`: it could not begin.
    pub(super) session: Option<Box<Session>>,
    pub(super) then: Then,
}

/// What became of a session meanwhile.
pub(super) enum Then {
    /// It took a datagram, or began.
    Ran,
    /// The datagram was dropped, for this reason.
    Dropped(&'static str),
    /// Its client is the device's peer: it is to be let in so.
    Joined(Acceptance),
    /// The device does not take its client.
    NotJoined,
    /// The device has its keys.
    Keyed,
    /// The device does not take its keys.
    NotKeyed,
}

impl Then {
    pub(super) fn dropped(error: Dropped) -> Self {
        tracing::debug!(%error, "dropped a packet of the control channel");
        Self::Dropped("control_packet_refused")
    }
}

impl Serving {
    /// Has something done with a client's session, as soon as no thread has it.
    pub(super) fn ask(&mut self, number: u32, todo: Todo) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        if !client.push(todo) {
            return self.count("queue_full");
        }
        self.work(number);
    }

    /// Does what waits for a client, or gives its session to a thread.
    pub(super) fn work(&mut self, number: u32) {
        loop {
            let is_free = self.jobs.len() < self.begun.threads_max;
            let Some(client) = self.clients.get_mut(&number) else { return };
            let Some(needs_thread) = client.needs_thread() else { return };
            let Some(mut session) = client.session.take() else { return };
            if needs_thread && !is_free {
                client.session = Some(session);
                if !std::mem::replace(&mut client.is_ready, true) {
                    self.ready.push_back(number);
                }
                return;
            }
            match client.pop() {
                Some(Todo::Datagram(packet)) if needs_thread => {
                    self.took(number);
                    self.jobs.spawn_blocking(move || {
                        let handled = session.handle_datagram(Instant::now(), &packet);
                        let then = handled.map_or_else(Then::dropped, |()| Then::Ran);
                        Done { number, session: Some(session), then }
                    });
                    return;
                }
                Some(Todo::Join(new, acceptance)) => {
                    return self.join(number, session, new, acceptance);
                }
                Some(todo) => self.do_now(number, session, todo),
                None => client.session = Some(session),
            }
        }
    }

    pub(super) fn do_now(&mut self, number: u32, mut session: Box<Session>, todo: Todo) {
        let now = Instant::now();
        match todo {
            // The device's part.
            Todo::Join(..) => {}
            Todo::Datagram(packet) => {
                self.took(number);
                let handled = session.handle_datagram(now, &packet);
                self.go_on(&mut session, handled.map_or_else(Then::dropped, |()| Then::Ran));
            }
            Todo::Timeout => session.handle_timeout(now),
            Todo::Deny(failure) => {
                // One that is over by now needs no answer.
                let _ = session.deny(now, failure);
            }
            Todo::Renew(token) => login::renew(&mut session, now, number, token),
            Todo::Token(token) => login::give_token(&mut session, now, token),
            Todo::AskCode => login::ask_code(&mut session, now),
            Todo::ShowPage(step, wait) => login::show_page(&mut session, now, &step, wait),
            Todo::Close(message) => _ = session.close(now, &message),
            Todo::Moved(address) => session.set_address(address),
            Todo::Renegotiate => {
                if let Err(error) = session.renegotiate(now) {
                    tracing::debug!(%error, "no new key now");
                }
            }
        }
        self.settle(number, session);
    }

    /// Makes a client a peer of the device.
    pub(super) fn join(
        &mut self,
        number: u32,
        session: Box<Session>,
        new: Box<NewPeer>,
        acceptance: Acceptance,
    ) {
        let channel = Arc::clone(&self.begun.channel);
        self.changes.spawn(async move {
            let then = match channel.new_peer(&new).await {
                Ok(()) => Then::Joined(acceptance),
                Err(error) => {
                    tracing::warn!(%error, "the device does not take a client");
                    Then::NotJoined
                }
            };
            Done { number, session: Some(session), then }
        });
    }

    /// A thread, or the device, is done with a session.
    pub(super) fn take_back(&mut self, done: Done) {
        let Done { number, session, then } = done;
        let client = self.clients.get(&number);
        match (session, client) {
            (Some(mut session), Some(client)) => {
                // It may have been ended while the device made it a peer.
                if matches!(then, Then::Joined(_)) && !client.is_peer() {
                    self.begun.channel.remove_peer(number);
                }
                self.go_on(&mut session, then);
                self.settle(number, session);
                self.work(number);
            }
            // It was ended meanwhile.
            (Some(_), None) if matches!(then, Then::Joined(_)) => {
                self.begun.channel.remove_peer(number);
            }
            (Some(_), None) => {}
            (None, _) => self.forget(number),
        }
        while self.jobs.len() < self.begun.threads_max
            && let Some(next) = self.ready.pop_front()
        {
            if let Some(client) = self.clients.get_mut(&next) {
                client.is_ready = false;
                self.work(next);
            }
        }
    }

    /// Tells a session what became of what it had asked for.
    pub(super) fn go_on(&mut self, session: &mut Session, then: Then) {
        let now = Instant::now();
        match then {
            Then::Ran | Then::Keyed => {}
            Then::Dropped(reason) => self.count(reason),
            Then::Joined(acceptance) => match session.accept(now, acceptance) {
                Ok(()) => {}
                Err(error @ SessionError::Push(_)) => {
                    tracing::warn!(%error, from = %session.address(), "a client cannot be pushed its options");
                    let text = "The gateway cannot push the options of this client: tell the administrator".to_owned();
                    let _ = session.deny(now, AuthFailure::Text(text));
                }
                Err(error) => tracing::debug!(%error, "a client left before it was let in"),
            },
            Then::NotJoined => {
                let text = "The gateway cannot take more clients".to_owned();
                // One that is over by now needs no answer.
                let _ = session.deny(now, AuthFailure::Text(text));
            }
            // A client whose keys the device does not take is told to connect again.
            Then::NotKeyed => {
                let text = "the gateway lost the key".to_owned();
                let restart = Message::Restart { preserve: true, next_remote: false, text };
                session.close(now, &restart);
            }
        }
    }

    /// Carries out what a session asks for, sends what it has to send, and notes when it wants to be called.
    pub(super) fn settle(&mut self, number: u32, mut session: Box<Session>) {
        let mut changes = Vec::new();
        while let Some(event) = session.poll_event() {
            changes.extend(self.handle_session_event(number, &mut session, event));
        }
        if !changes.is_empty() && self.clients.contains_key(&number) {
            return self.change_keys(number, session, changes);
        }
        self.note_proven(number);
        let now = Instant::now();
        while let Some(transmit) = session.poll_transmit(now) {
            self.transmit(number, transmit.address, &transmit.bytes);
        }
        let Some(client) = self.clients.get_mut(&number) else { return };
        if session.is_drained(now) {
            return self.forget(number);
        }
        let timer = session.poll_timeout(now);
        client.session = Some(session);
        let before = std::mem::replace(&mut client.timer, timer);
        if let Some(before) = before {
            self.timers.remove(&(before, number));
        }
        if let Some(timer) = timer {
            self.timers.insert((timer, number));
        }
    }

    /// Has the device change a client's keys. The session's packets wait for that: with them the other end begins to use
    /// a key.
    pub(super) fn change_keys(
        &mut self,
        number: u32,
        session: Box<Session>,
        changes: Vec<KeyChange>,
    ) {
        let channel = Arc::clone(&self.begun.channel);
        self.changes.spawn(async move {
            let then = match channel.change_keys(number, &changes).await {
                Ok(()) => Then::Keyed,
                // Its peer has ended meanwhile.
                Err(error) if error.is_gone() => Then::NotKeyed,
                Err(error) => {
                    let from = session.address();
                    tracing::warn!(%error, %from, "the device does not take a client's key");
                    Then::NotKeyed
                }
            };
            Done { number, session: Some(session), then }
        });
    }
}
