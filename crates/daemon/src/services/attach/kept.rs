//! Attachments whose container is not attached now. A container that has ended keeps its addresses for a
//! while. One that could not be attached is retried.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use weft_container::{Sandbox, SandboxKind};
use weft_kernel::KernelError;
use weft_path::Vni;

use super::look;
use super::maker::command_id;
use super::{Attachments, Inner, Locked, Saved, announce, spec_of};
use crate::core::control::Request;
use crate::services::networks::OnNetwork;
use crate::services::supervisor::{self, Pulse};
use crate::timestamp;

/// The container is attached.
pub(crate) const ATTACHED: &str = "attached";
/// The container runs but could not be attached.
pub(crate) const FAILED: &str = "failed";
/// The container has ended.
pub(crate) const GONE: &str = "gone";

/// How long the addresses of an ended container are kept for it, in hours.
const KEPT_H: u64 = 24;
/// Ended containers that are remembered; beyond that, the one that ended first is forgotten.
const KEPT_MAX: usize = 256;
/// The interval between checks for attachments to retry, in milliseconds.
const LOOK_MS: u64 = 1_000;
/// First pause before a container is retried, in milliseconds; doubles each time.
const RETRY_FIRST_MS: u64 = 1_000;
/// Longest such pause, in milliseconds.
const RETRY_MAX_MS: u64 = 30_000;

/// When attachments are retried, by their keys.
#[derive(Default)]
pub(crate) struct Retries(BTreeMap<String, (Instant, Duration)>);

impl Retries {
    /// Whether it is time to retry; if so, postpones the next retry.
    fn is_due(&mut self, id: &str, now: Instant) -> bool {
        let first = Duration::from_millis(RETRY_FIRST_MS);
        let (at, pause) = self.0.entry(id.to_owned()).or_insert((now + first, first));
        if *at > now {
            return false;
        }
        *pause = (*pause * 2).min(Duration::from_millis(RETRY_MAX_MS));
        *at = now + *pause;
        true
    }

    /// Makes the first retry due with the next look.
    pub(crate) fn at_once(&mut self, id: &str, now: Instant) {
        self.0.insert(id.to_owned(), (now, Duration::from_millis(RETRY_FIRST_MS)));
    }

    pub(crate) fn forget(&mut self, id: &str) {
        self.0.remove(id);
    }
}

impl Saved {
    pub(crate) fn is_attached(&self) -> bool {
        self.attachment.state == ATTACHED
    }

    /// Whether its container's namespace is still there, as far as Weft can tell.
    pub(crate) fn is_alive(&self) -> bool {
        !self.maker.has_namespace() || look::is_alive(&self.sandbox)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.attachment.state == GONE
    }

    /// Whether its container may come back under the same key: a process cannot.
    pub(crate) fn may_come_back(&self) -> bool {
        if !self.maker.is_command() {
            return false;
        }
        match self.sandbox.kind {
            SandboxKind::Docker | SandboxKind::Netns => true,
            SandboxKind::Pid => false,
            SandboxKind::Path => !self.sandbox.namespace.starts_with("/proc"),
        }
    }

    /// Whether its container is looked for before the daemon serves anybody. Docker is not asked then: after a reboot
    /// it starts too, and may wait for Weft's plugin before it answers.
    pub(super) fn is_sought_at_start(&self) -> bool {
        self.may_come_back() && self.sandbox.kind != SandboxKind::Docker
    }

    /// Whether addresses are reserved for its container, which has ended.
    fn keeps_addresses(&self) -> bool {
        self.is_gone() && self.maker.is_command()
    }

    pub(crate) fn set_attached(&mut self) {
        self.attachment.state = ATTACHED.into();
        (self.attachment.reason, self.attachment.state_since) = (None, None);
    }

    /// Records that it is not attached; the time stays that of the first such moment.
    pub(crate) fn set_out(&mut self, state: &str, reason: String) {
        if self.attachment.state != state || self.attachment.state_since.is_none() {
            self.attachment.state_since = Some(timestamp::format(SystemTime::now()));
        }
        self.attachment.state = state.into();
        self.attachment.reason = Some(reason);
    }

    /// The reason why it is still listed though its container has ended.
    fn ended(&self) -> String {
        match self.maker.is_docker() {
            true => "its interface is gone, as after a crash of the container: restart it by docker restart".into(),
            false => format!(
                "its network namespace is gone; its addresses are kept for {KEPT_H} h, or until weft detach"
            ),
        }
    }

    fn out_since(&self) -> SystemTime {
        let since = self.attachment.state_since.as_deref().and_then(timestamp::parse);
        since.unwrap_or_else(SystemTime::now)
    }

    /// Whether its addresses have been kept for long enough.
    fn is_over(&self, now: SystemTime) -> bool {
        let kept = now.duration_since(self.out_since()).unwrap_or_default();
        self.is_gone() && kept >= Duration::from_secs(KEPT_H * 3_600)
    }
}

impl Inner {
    /// The attachment on a network whose container ended first.
    pub(crate) fn longest_gone(&self, vni: Vni) -> Option<String> {
        let is_gone = |saved: &Saved| saved.vni() == vni && saved.keeps_addresses();
        let gone = self.saved.iter().filter(|(_, saved)| is_gone(saved));
        gone.min_by_key(|(_, saved)| saved.out_since()).map(|(id, _)| id.clone())
    }

    /// The attachment on any network whose container ended first.
    fn longest_gone_of_all(&self) -> Option<String> {
        let gone = self.saved.iter().filter(|(_, saved)| saved.keeps_addresses());
        gone.min_by_key(|(_, saved)| saved.out_since()).map(|(id, _)| id.clone())
    }

    /// The attachment of an ended container that had this address on a network.
    pub(crate) fn gone_with(&self, vni: Vni, address: IpAddr) -> Option<String> {
        let has = |saved: &Saved| {
            let mut addresses = saved.attachment.addresses.iter();
            saved.vni() == vni && addresses.any(|net| net.addr() == address)
        };
        let gone = self.saved.iter().find(|(_, saved)| saved.keeps_addresses() && has(saved));
        gone.map(|(id, _)| id.clone())
    }

    /// If the namespace is already attached to the network under another name, returns it as known.
    pub(crate) fn known_as(&self, found: Sandbox, network: &OnNetwork) -> Sandbox {
        if self.saved.contains_key(&command_id(&found, &network.name)) {
            return found;
        }
        let mut known = self.of_namespace(&found);
        let known = known.find(|known| known.vni() == network.vni).map(|it| it.sandbox.clone());
        known.unwrap_or(found)
    }

    /// The attachments of a namespace by `weft attach`, by whichever name.
    pub(crate) fn of_namespace<'a>(
        &'a self,
        found: &Sandbox,
    ) -> impl Iterator<Item = &'a Saved> + use<'a> {
        let place = |sandbox: &Sandbox| (sandbox.device, sandbox.inode);
        let wanted = place(found);
        self.saved.values().filter(move |saved| {
            saved.maker.is_command()
                && place(&saved.sandbox) == wanted
                && !saved.is_gone()
                && saved.is_alive()
        })
    }
}

impl Locked<'_> {
    /// Attachments whose addresses have been kept for long enough, and those to try again now. Most looks find none,
    /// and so must not publish the list of all containers anew.
    fn due(&mut self, now: Instant, wall: SystemTime) -> (Vec<String>, Vec<String>) {
        let Inner { saved, retries } = &mut *self.inner;
        let over = saved.iter().filter(|(_, saved)| saved.is_over(wall));
        let over = over.map(|(id, _)| id.clone()).collect();
        // An interface of Docker's comes back only with its container.
        let is_final = |saved: &Saved| saved.maker.is_docker() && saved.is_gone();
        let out = saved.iter().filter(|(_, saved)| !saved.is_attached() && !is_final(saved));
        let due = out.map(|(id, _)| id.clone()).filter(|id| retries.is_due(id, now)).collect();
        (over, due)
    }

    /// Replaces an attachment. The list is published only if it shows that.
    pub(super) fn put(&mut self, id: String, saved: Saved) {
        let before = self.inner.saved.get(&id).map(Saved::shown);
        self.changed |= before != Some(saved.shown());
        self.inner.saved.insert(id, saved);
    }
}

impl Attachments {
    /// A container has ended: removes its interface and keeps its addresses for a while.
    pub(crate) async fn keep(&self, inner: &mut Inner, id: &str) {
        let Some(saved) = inner.saved.get_mut(id) else { return };
        if !saved.may_come_back() && !saved.maker.is_docker() {
            self.let_go(inner, id).await;
            return;
        }
        if !saved.is_gone() {
            saved.set_out(GONE, saved.ended());
        }
        let saved = saved.clone();
        inner.retries.forget(id);
        self.take_out(&saved).await;
        let gone = inner.saved.values().filter(|saved| saved.keeps_addresses()).count();
        if gone > KEPT_MAX
            && let Some(first) = inner.longest_gone_of_all()
        {
            self.let_go(inner, &first).await;
        }
    }

    /// Ends an attachment for good, saves that, and releases its addresses.
    pub(crate) async fn let_go(&self, inner: &mut Inner, id: &str) {
        let Some(saved) = inner.saved.remove(id) else { return };
        inner.retries.forget(id);
        // Before the kernel, since the caller may leave meanwhile.
        self.save_or_later(inner);
        self.unplug(id, &saved).await;
    }

    /// Plugs in containers that came back or failed before, and drops expired attachments.
    async fn try_again(&self) {
        let (over, due) = self.lock().await.due(Instant::now(), SystemTime::now());
        if !over.is_empty() {
            let mut inner = self.lock().await;
            for id in &over {
                tracing::info!(
                    id,
                    "its container has been gone for {KEPT_H} h: its addresses are free"
                );
                self.let_go(&mut inner, id).await;
            }
        }
        for id in due.iter().filter(|id| !over.contains(id)) {
            supervisor::beat();
            let mut found = self.alive(id).await;
            if found.is_none()
                && let Some(key) = self.may_come_back(id).await
            {
                // Docker may be slow, so the lock is not held meanwhile.
                let again = weft_container::resolve(&key, &self.resolve).await.ok();
                found = again.filter(|again| again.id == key);
            }
            let mut inner = self.lock().await;
            match found {
                Some(found) => self.bring_back(&mut inner, id, found).await,
                None => self.end_failed(&mut inner, id).await,
            }
        }
    }

    /// The namespace of an attachment, if it is still there.
    async fn alive(&self, id: &str) -> Option<Sandbox> {
        let inner = self.lock().await;
        inner.saved.get(id).filter(|saved| saved.is_alive()).map(|saved| saved.sandbox.clone())
    }

    /// The key of the container, if it may come back.
    async fn may_come_back(&self, id: &str) -> Option<String> {
        let inner = self.lock().await;
        let saved = inner.saved.get(id).filter(|saved| saved.may_come_back());
        saved.map(|saved| saved.sandbox.id.clone())
    }

    /// A container that could not be attached may have ended meanwhile.
    async fn end_failed(&self, inner: &mut Locked<'_>, id: &str) {
        let Some(saved) = inner.saved.get(id) else { return };
        if saved.attachment.state == FAILED && !saved.is_alive() {
            self.keep(inner, id).await;
            self.save_or_later(inner);
        }
    }

    pub(super) async fn bring_back(&self, inner: &mut Locked<'_>, id: &str, found: Sandbox) {
        let Some(saved) = inner.saved.get(id).filter(|saved| !saved.is_attached()) else { return };
        if !saved.may_come_back() && !saved.is_alive() {
            // Another process has its pid now.
            return self.let_go(inner, id).await;
        }
        let before = saved.attachment.clone();
        let mut saved = saved.clone();
        saved.found_again(found);
        self.plug_in_apart(inner, &mut saved).await;
        if saved.is_attached() {
            inner.retries.forget(id);
            tokio::spawn(announce(self.kernel.clone(), saved.vni(), spec_of(&saved)));
            tracing::info!(container = %saved.attachment.name, id, "attached again");
        }
        let changed = saved.attachment != before;
        inner.put(id.to_owned(), saved);
        if changed {
            self.save_or_later(inner);
        }
    }

    /// Plugs a container in and announces it, or records why not.
    pub(crate) async fn plug_in_or_say(&self, saved: &mut Saved) {
        supervisor::beat();
        match self.plug_in(saved).await {
            Ok(()) => {
                saved.set_attached();
                self.tell(Request::Announce { attachment: saved.shown().into() }).await;
            }
            Err(KernelError::LinkMissing { .. }) if saved.maker.is_docker() => {
                let reason = saved.ended();
                tracing::warn!(container = saved.attachment.name, reason, "not attached");
                saved.set_out(GONE, reason);
                self.withdraw(saved).await;
            }
            Err(error) => self.say_out(saved, error.to_string()).await,
        }
    }

    /// As [`Self::plug_in_or_say`], for a container that was not attached. Another face may have attached it to the
    /// network meanwhile.
    pub(super) async fn plug_in_apart(&self, inner: &Inner, saved: &mut Saved) {
        match inner.check_apart(saved) {
            Ok(()) => self.plug_in_or_say(saved).await,
            Err(error) => self.say_out(saved, error.to_string()).await,
        }
    }

    /// Records why a container that runs is not attached.
    async fn say_out(&self, saved: &mut Saved, reason: String) {
        if saved.attachment.reason.as_ref() != Some(&reason) {
            let container = &saved.attachment.name;
            tracing::warn!(container, reason, "not attached; trying again");
        }
        saved.set_out(FAILED, reason);
        self.withdraw(saved).await;
    }
}

/// Retries containers that are not attached, for as long as it is polled.
pub(crate) async fn keep_trying(attachments: Arc<Attachments>, pulse: Pulse) {
    loop {
        pulse.wait(tokio::time::sleep(Duration::from_millis(LOOK_MS))).await;
        attachments.try_again().await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::sync::watch;

    use super::*;
    use crate::services::attach::changes::Changes;

    fn failed(reason: &str) -> Saved {
        let attachment = format!(
            r#"{{"id":"netns:a","name":"a","interface":"weft0","mac":"02:00:00:00:00:07","state":"{FAILED}",
            "reason":"{reason}","addresses":["10.32.0.1/12"],"mtu":1388,"since":""}}"#
        );
        let sandbox = r#"{"id":"netns:a","name":"a","namespace":"/run/netns/a","kind":"netns",
            "pid":null,"pid_start":null,"device":4,"inode":5}"#;
        let text = format!(
            r#"{{"sandbox":{sandbox},"attachment":{attachment},"host_interface":"weftv1","multicast_route":true}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[tokio::test]
    async fn the_list_is_published_only_when_it_shows_something_new() {
        let saved = BTreeMap::from([("netns:a".to_owned(), failed("no room"))]);
        let all = Changes::new(Inner { saved, retries: Retries::default() });
        let (sender, mut shown) = watch::channel(Arc::default());
        let (start, wall) = (Instant::now(), SystemTime::now());
        let mut due = Vec::new();
        for ms in [0, 0, 1_000, 2_000] {
            let now = start + Duration::from_millis(ms);
            let inner = all.begin().await.unwrap();
            let mut locked = Locked { inner, shown: &sender, changed: false };
            let (over, some) = locked.due(now, wall);
            assert_eq!(over, [""; 0]);
            due.push(some.len());
            locked.put("netns:a".to_owned(), failed("no room"));
        }
        assert_eq!(due, [0, 0, 1, 0]);
        assert!(!shown.has_changed().unwrap());
        let inner = all.begin().await.unwrap();
        let mut locked = Locked { inner, shown: &sender, changed: false };
        locked.put("netns:a".to_owned(), failed("no bridge"));
        drop(locked);
        assert!(shown.has_changed().unwrap());
        assert_eq!(shown.borrow_and_update()[0].reason.as_deref(), Some("no bridge"));
    }

    #[test]
    fn docker_is_asked_for_a_container_right_after_the_start_and_not_before() {
        for (kind, before, after) in [
            (SandboxKind::Docker, false, true),
            (SandboxKind::Netns, true, true),
            (SandboxKind::Path, true, true),
            (SandboxKind::Pid, false, false),
        ] {
            let mut saved = failed("no room");
            saved.sandbox.kind = kind;
            assert_eq!((saved.is_sought_at_start(), saved.may_come_back()), (before, after));
        }
        let mut retries = Retries::default();
        let start = Instant::now();
        retries.at_once("docker:a", start);
        let due = [0, 0, 1_999, 2_000].map(|ms| start + Duration::from_millis(ms));
        let due = due.map(|now| retries.is_due("docker:a", now));
        assert_eq!(due, [true, false, false, true]);
    }

    #[test]
    fn retries_become_less_frequent() {
        let mut retries = Retries::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert!(!retries.is_due("netns:a", start));
        let due: Vec<u64> =
            (0..200_000).step_by(500).filter(|ms| retries.is_due("netns:a", at(*ms))).collect();
        assert_eq!(due[..6], [1_000, 3_000, 7_000, 15_000, 31_000, 61_000]);
        assert_eq!(due[6], 91_000);
        retries.forget("netns:a");
        assert!(!retries.is_due("netns:a", at(200_000)));
        assert!(retries.is_due("netns:a", at(201_000)));
    }
}
