//! The hosts in the mesh, linked or not, and the addresses at which each may be dialled.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rand::Rng;
use weft_crypto::PeerId;

use crate::limits::{
    ADDRESSES_PER_MEMBER_MAX, DIAL_FIRST_MS, DIAL_PAUSE_MAX_MS, MEMBER_FORGET_S, MEMBERS_MAX,
    NICKNAME_BYTES_MAX,
};
use crate::message::MemberInfo;
use crate::state::SavedMember;

/// One other host.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) nickname: String,
    pub(crate) addresses: BTreeSet<SocketAddr>,
    /// The address at which this host's link saw it last.
    seen_at: Option<SocketAddr>,
    /// When anyone heard of was last linked with it, as far as known.
    pub(crate) last_seen: Instant,
    /// The highest generation of its state that it has told.
    pub(crate) generation: u64,
    /// When to dial it next; `None` while it is linked.
    dial_at: Option<Instant>,
    dial_pause: Duration,
}

/// The table of members.
#[derive(Debug, Default)]
pub(crate) struct Members(BTreeMap<PeerId, Member>);

/// Whether an address can be dialled at all.
fn can_be_dialled(address: &SocketAddr) -> bool {
    let scoped = |ip: std::net::Ipv6Addr| ip.is_unicast_link_local();
    let plain = match address {
        SocketAddr::V4(v4) => !v4.ip().is_broadcast(),
        SocketAddr::V6(v6) => !scoped(*v6.ip()),
    };
    plain && address.port() != 0 && !address.ip().is_unspecified() && !address.ip().is_multicast()
}

/// The first dialable addresses, as many as are kept.
fn some_addresses<'a>(all: impl IntoIterator<Item = &'a SocketAddr>) -> BTreeSet<SocketAddr> {
    let fit = all.into_iter().filter(|address| can_be_dialled(address)).copied();
    fit.take(ADDRESSES_PER_MEMBER_MAX).collect()
}

impl Members {
    /// The members of the last run, due to be dialled at once if discovery is on.
    pub(crate) fn restore(now: Instant, saved: &[SavedMember], discovery: bool) -> Self {
        let mut members = Self::default();
        for member in saved.iter().take(MEMBERS_MAX) {
            let fresh = Member {
                nickname: clip(&member.nickname),
                addresses: some_addresses(&member.addresses),
                seen_at: None,
                last_seen: now,
                generation: member.generation,
                dial_at: discovery.then_some(now),
                dial_pause: Duration::from_millis(DIAL_FIRST_MS),
            };
            members.0.insert(member.peer, fresh);
        }
        members
    }

    pub(crate) fn saved(&self) -> Vec<SavedMember> {
        let save = |(peer, member): (&PeerId, &Member)| SavedMember {
            peer: *peer,
            nickname: member.nickname.clone(),
            addresses: member.addresses.iter().copied().collect(),
            generation: member.generation,
        };
        self.0.iter().map(save).collect()
    }

    pub(crate) fn get(&self, peer: PeerId) -> Option<&Member> {
        self.0.get(&peer)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (PeerId, &Member)> {
        self.0.iter().map(|(peer, member)| (*peer, member))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A member has reported the generation of its state. Returns whether it is the highest so far.
    pub(crate) fn note_generation(&mut self, peer: PeerId, generation: u64) -> bool {
        let Some(member) = self.0.get_mut(&peer) else { return false };
        let is_news = generation > member.generation;
        member.generation = member.generation.max(generation);
        is_news
    }

    pub(crate) fn has_room_for(&self, peer: PeerId) -> bool {
        self.0.len() < MEMBERS_MAX || self.0.contains_key(&peer)
    }

    /// The member that was last seen the longest ago, among those that are not `alive`.
    pub(crate) fn oldest(&self, alive: &BTreeSet<PeerId>) -> Option<PeerId> {
        let gone = self.0.iter().filter(|(peer, _)| !alive.contains(peer));
        gone.min_by_key(|(_, member)| member.last_seen).map(|(peer, _)| *peer)
    }

    /// A link came up: the member's own statement replaces those of others, its first address is the link's.
    /// `None`: no news for others; otherwise the address at which it was seen before, if it has left that.
    pub(crate) fn linked(
        &mut self,
        now: Instant,
        peer: PeerId,
        nickname: &str,
        addresses: &[SocketAddr],
    ) -> Option<Vec<SocketAddr>> {
        let seen_at = addresses.first().copied();
        let mut addresses = some_addresses(addresses);
        let nickname = clip(nickname);
        let known = self.0.get(&peer);
        if addresses.is_empty() {
            addresses = known.map(|member| member.addresses.clone()).unwrap_or_default();
        }
        let news = known.is_none_or(|m| m.nickname != nickname || m.addresses != addresses);
        let before = known.and_then(|member| member.seen_at);
        let gone = before.filter(|before| !addresses.contains(before));
        let dial_pause = Duration::from_millis(DIAL_FIRST_MS);
        let generation = known.map_or(0, |member| member.generation);
        let (last_seen, dial_at) = (now, None);
        let member =
            Member { nickname, addresses, seen_at, last_seen, generation, dial_at, dial_pause };
        self.0.insert(peer, member);
        news.then(|| gone.into_iter().collect())
    }

    /// The link of a member goes on from another address. Returns the address before; `None`: no news.
    pub(crate) fn moved(&mut self, peer: PeerId, to: SocketAddr) -> Option<Vec<SocketAddr>> {
        let member = self.0.get_mut(&peer)?;
        let before = member.seen_at.replace(to);
        if before == Some(to) || !can_be_dialled(&to) {
            return None;
        }
        let gone: Vec<SocketAddr> = before.into_iter().collect();
        member.addresses.retain(|address| !gone.contains(address));
        while member.addresses.len() >= ADDRESSES_PER_MEMBER_MAX {
            member.addresses.pop_last();
        }
        member.addresses.insert(to);
        Some(gone)
    }

    /// The link is gone: the member is dialled after a pause.
    pub(crate) fn unlinked(
        &mut self,
        now: Instant,
        peer: PeerId,
        discovery: bool,
        rng: &mut impl Rng,
    ) {
        if let Some(member) = self.0.get_mut(&peer) {
            member.last_seen = now;
            member.dial_at = discovery.then(|| now + jittered(member.dial_pause, rng));
        }
    }

    /// Another host describes a member that is not linked. Returns whether to tell others.
    pub(crate) fn heard(&mut self, now: Instant, info: &MemberInfo, discovery: bool) -> bool {
        let age = Duration::from_secs(info.age_s);
        if age.as_secs() >= MEMBER_FORGET_S || !self.has_room_for(info.peer) {
            return false;
        }
        let seen = now.checked_sub(age).unwrap_or(now);
        let Some(member) = self.0.get_mut(&info.peer) else {
            let member = Member {
                nickname: clip(&info.nickname),
                addresses: some_addresses(&info.addresses),
                seen_at: None,
                last_seen: seen,
                generation: 0,
                dial_at: discovery.then_some(now),
                dial_pause: Duration::from_millis(DIAL_FIRST_MS),
            };
            self.0.insert(info.peer, member);
            return true;
        };
        member.last_seen = member.last_seen.max(seen);
        let mut news = false;
        for address in info.gone.iter().take(ADDRESSES_PER_MEMBER_MAX) {
            // The last one stays: it is better than none.
            let others = info.addresses.iter().any(|other| other != address);
            news |= others && member.addresses.remove(address);
        }
        for address in some_addresses(&info.addresses) {
            if member.addresses.len() < ADDRESSES_PER_MEMBER_MAX {
                news |= member.addresses.insert(address);
            }
        }
        if news && discovery {
            member.dial_at = Some(now);
        }
        news
    }

    /// A host has a link with the member.
    pub(crate) fn seen(&mut self, now: Instant, peer: PeerId) {
        if let Some(member) = self.0.get_mut(&peer) {
            member.last_seen = now;
        }
    }

    pub(crate) fn info(&self, now: Instant, peer: PeerId) -> Option<MemberInfo> {
        let member = self.0.get(&peer)?;
        Some(MemberInfo {
            peer,
            nickname: member.nickname.clone(),
            addresses: member.addresses.iter().copied().collect(),
            gone: Vec::new(),
            age_s: now.saturating_duration_since(member.last_seen).as_secs(),
        })
    }

    pub(crate) fn next_dial(&self) -> Option<Instant> {
        self.0.values().filter_map(|member| member.dial_at).min()
    }

    /// Members that are due to be dialled.
    pub(crate) fn take_due(
        &mut self,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Vec<(PeerId, Vec<SocketAddr>)> {
        let mut due = Vec::new();
        for (peer, member) in &mut self.0 {
            if member.dial_at.is_none_or(|at| at > now) {
                continue;
            }
            if member.addresses.is_empty() {
                member.dial_at = None;
                continue;
            }
            due.push((*peer, member.addresses.iter().copied().collect()));
            member.dial_at = Some(now + jittered(member.dial_pause, rng));
            let longest = Duration::from_millis(DIAL_PAUSE_MAX_MS);
            member.dial_pause = (member.dial_pause * 3 / 2).min(longest);
        }
        due
    }

    /// Drops members without a sign of life for [`MEMBER_FORGET_S`].
    pub(crate) fn forget_old(&mut self, now: Instant, alive: &BTreeSet<PeerId>) -> Vec<PeerId> {
        let limit = Duration::from_secs(MEMBER_FORGET_S);
        let old = |(peer, member): (&PeerId, &Member)| {
            let gone = now.saturating_duration_since(member.last_seen) >= limit;
            (gone && !alive.contains(peer)).then_some(*peer)
        };
        let forgotten: Vec<PeerId> = self.0.iter().filter_map(old).collect();
        forgotten.iter().for_each(|peer| drop(self.0.remove(peer)));
        forgotten
    }

    /// Drops one member; whether there was one.
    pub(crate) fn forget(&mut self, peer: PeerId) -> bool {
        self.0.remove(&peer).is_some()
    }
}

/// A pause of half to one and a half times the given one, so that hosts do not dial in step.
fn jittered(pause: Duration, rng: &mut impl Rng) -> Duration {
    let permille = 500 + u32::try_from(rng.next_u64() % 1000).unwrap_or(0);
    pause * permille / 1000
}

/// At most [`NICKNAME_BYTES_MAX`] bytes of a nickname, without control characters.
pub(crate) fn clip(nickname: &str) -> String {
    let mut clean: String = nickname.chars().filter(|c| !c.is_control()).collect();
    while clean.len() > NICKNAME_BYTES_MAX {
        clean.pop();
    }
    clean
}
