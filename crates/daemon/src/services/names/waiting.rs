//! Clients that wait for upstream servers, by question. No client can take the places of all others.

use std::collections::BTreeMap;
use std::net::IpAddr;

use hickory_proto::op::Query;

use super::answer::Form;
use super::cache::Key;
use super::sockets::Back;

/// Questions under way upstream.
pub(crate) const EXCHANGES_MAX: usize = 1_024;
/// Of these, questions that one client was the first to ask.
pub(crate) const EXCHANGES_PER_CLIENT_MAX: usize = 128;
/// Clients that wait, each for one answer.
pub(crate) const WAITERS_MAX: usize = 8_192;
/// Answers that one client waits for.
pub(crate) const WAITERS_PER_CLIENT_MAX: usize = 512;

/// A client that waits for an upstream server.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) query: Query,
    pub(crate) form: Form,
    pub(crate) back: Back,
    /// Its name in tables of clients.
    pub(crate) client: IpAddr,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    questions: BTreeMap<Key, Question>,
    clients: BTreeMap<IpAddr, Load>,
    waiters: usize,
}

#[derive(Debug)]
struct Question {
    /// The first client that asked.
    asker: IpAddr,
    waiters: Vec<Waiter>,
}

/// The places that a client takes.
#[derive(Debug, Default)]
struct Load {
    questions: usize,
    waiters: usize,
}

impl Waiting {
    /// Whether the question is under way.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.questions.contains_key(key)
    }

    /// Adds a client that waits.
    ///
    /// # Errors
    /// The client itself if there is no place for it.
    pub(crate) fn add(&mut self, key: &Key, waiter: Waiter) -> Result<(), Box<Waiter>> {
        let client = waiter.client;
        let is_new = !self.has(key);
        let load = self.clients.get(&client);
        let (questions, waiters) = load.map_or((0, 0), |load| (load.questions, load.waiters));
        let is_full = self.waiters >= WAITERS_MAX || waiters >= WAITERS_PER_CLIENT_MAX;
        let is_busy =
            self.questions.len() >= EXCHANGES_MAX || questions >= EXCHANGES_PER_CLIENT_MAX;
        if is_full || (is_new && is_busy) {
            return Err(Box::new(waiter));
        }
        let load = self.clients.entry(client).or_default();
        load.waiters += 1;
        load.questions += usize::from(is_new);
        self.waiters += 1;
        let empty = || Question { asker: client, waiters: Vec::new() };
        self.questions.entry(key.clone()).or_insert_with(empty).waiters.push(waiter);
        Ok(())
    }

    /// The question is answered, or never will be: takes the clients that wait for it.
    pub(crate) fn take(&mut self, key: &Key) -> Vec<Waiter> {
        let Some(question) = self.questions.remove(key) else { return Vec::new() };
        self.waiters = self.waiters.saturating_sub(question.waiters.len());
        self.release(question.asker, |load| load.questions = load.questions.saturating_sub(1));
        for waiter in &question.waiters {
            self.release(waiter.client, |load| load.waiters = load.waiters.saturating_sub(1));
        }
        question.waiters
    }

    fn release(&mut self, client: IpAddr, change: impl FnOnce(&mut Load)) {
        let Some(load) = self.clients.get_mut(&client) else { return };
        change(load);
        if load.questions == 0 && load.waiters == 0 {
            self.clients.remove(&client);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use hickory_proto::op::{Message, MessageType, OpCode};
    use hickory_proto::rr::{Name, RecordType};
    use tokio::sync::oneshot;

    use super::super::answer::Carrier;
    use super::*;

    fn key(n: usize) -> Key {
        let name = Name::from_ascii(format!("n{n}.")).unwrap();
        Key::new(&Query::query(name, RecordType::A), false, false)
    }

    fn waiter(client: u8) -> Waiter {
        let mut message = Message::new(1, MessageType::Query, OpCode::Query);
        let query = Query::query(Name::root(), RecordType::A);
        message.add_query(query.clone());
        let (back, _) = oneshot::channel();
        let client = [10, 0, 0, client].into();
        Waiter { query, form: Form::of(&message, Carrier::Tcp), back: Back::Tcp(back), client }
    }

    #[test]
    fn one_client_leaves_places_to_others() {
        let mut waiting = Waiting::default();
        let asked = (0..10_000).filter(|n| waiting.add(&key(*n), waiter(1)).is_ok()).count();
        assert_eq!(asked, EXCHANGES_PER_CLIENT_MAX);
        waiting.add(&key(20_000), waiter(2)).unwrap();
        // The first client still joins questions of others, up to its limit.
        let joined = (0..10_000).filter(|_| waiting.add(&key(20_000), waiter(1)).is_ok()).count();
        assert_eq!(joined, WAITERS_PER_CLIENT_MAX - EXCHANGES_PER_CLIENT_MAX);
        waiting.add(&key(20_000), waiter(3)).unwrap();
        assert_eq!(waiting.take(&key(20_000)).len(), joined + 2);
        assert!(waiting.add(&key(20_001), waiter(1)).is_err(), "its questions are under way");
        assert_eq!(waiting.take(&key(0)).len(), 1);
        waiting.add(&key(20_001), waiter(1)).unwrap();
    }

    #[test]
    fn many_clients_wait_for_one_answer_and_all_places_are_given_back() {
        let mut waiting = Waiting::default();
        for client in 0..=255 {
            waiting.add(&key(1), waiter(client)).unwrap();
        }
        assert_eq!(waiting.take(&key(1)).len(), 256);
        assert_eq!(waiting.take(&key(1)).len(), 0);
        assert!((waiting.waiters, waiting.clients.len(), waiting.questions.len()) == (0, 0, 0));
        for client in 0..=255 {
            for n in 0..EXCHANGES_PER_CLIENT_MAX {
                let _ = waiting.add(&key(1_000 * usize::from(client) + n), waiter(client));
            }
        }
        assert_eq!(waiting.questions.len(), EXCHANGES_MAX);
    }
}
