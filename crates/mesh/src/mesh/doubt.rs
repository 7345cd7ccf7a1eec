//! Whether a host may act on its saved state, which may be a copy or older than the state that others have
//! seen.
//!
//! A state directory from a backup, or from another machine's image, still lists ranges that this host has
//! given away. It also lists addresses as free that containers have. So a host counts every change of its
//! ranges and given addresses (its generation) and tells its peers, which remember the highest. A host that
//! cannot tell that it continues where its last run ended asks its peers first. It gives no address and no
//! range until then.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use weft_crypto::PeerId;

use super::{Change, Mesh, Output};
use crate::config::Origin;
use crate::error::MeshError;
use crate::limits::{
    ANNOUNCEMENT_VERSION_MAX, COPY_HOLD_S, DOUBT_ALONE_S, DOUBT_LINGER_S, GENERATION_SAVE_S,
    NAME_BYTES_MAX, RELAYED_VERSION_MAX,
};
use crate::members::Members;
use crate::message::Message;
use crate::state::State;

/// Whether the state may be acted on.
#[derive(Debug)]
pub(crate) enum Standing {
    /// It is the newest.
    Sure,
    /// Other members have to report the highest generation that they saw.
    Doubt(Doubt),
    /// A later one is known: this host gives nothing any more.
    Older {
        /// The name of the host that knows it; it may be this host's last run.
        by: String,
    },
    /// Another host has the same identity and is alive.
    Copy {
        /// In the words of the peer that refused this host.
        reason: String,
        /// When the copy counts as gone, unless a peer refuses this host again.
        until: Instant,
    },
}

/// The progress of asking.
#[derive(Debug)]
pub(crate) struct Doubt {
    /// The state was written elsewhere.
    copied: bool,
    /// When to believe it without an answer.
    alone_until: Option<Instant>,
    /// Members that have answered.
    answered: BTreeSet<PeerId>,
    /// When to stop waiting for the others.
    until: Option<Instant>,
}

impl Standing {
    /// The standing of a host that starts.
    pub(crate) fn at_start(now: Instant, origin: Origin, state: &State, members: &Members) -> Self {
        let known = origin.last_generation;
        if state.weft.network.is_none() {
            return Self::Sure;
        }
        match known {
            Some(last) if last > state.generation => {
                Self::Older { by: "this host's previous run".to_owned() }
            }
            Some(_) => Self::Sure,
            None if members.is_empty() => Self::Sure,
            None => Self::doubt(now, origin.copied),
        }
    }

    fn doubt(now: Instant, copied: bool) -> Self {
        let alone_until = (!copied).then(|| now + Duration::from_secs(DOUBT_ALONE_S));
        Self::Doubt(Doubt { copied, alone_until, answered: BTreeSet::new(), until: None })
    }

    pub(crate) fn is_sure(&self) -> bool {
        matches!(self, Self::Sure)
    }

    /// Whether waiting for links may still settle it soon.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Doubt(_))
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        match self {
            Self::Doubt(doubt) => [doubt.alone_until, doubt.until].into_iter().flatten().min(),
            Self::Copy { until, .. } => Some(*until),
            Self::Sure | Self::Older { .. } => None,
        }
    }
}

impl Mesh {
    /// Why this host gives no address at present, although it owns ranges; for the user.
    pub fn unsure(&self) -> Option<String> {
        match &self.standing {
            Standing::Sure => None,
            Standing::Doubt(Doubt { copied: true, .. }) => Some(
                "the saved state was copied from a backup or another machine: waiting for another member of the network to confirm that it is the newest (if this host is a copy of one that still runs: weft stop, weft reset, and launch it again)"
                    .to_owned(),
            ),
            Standing::Doubt(_) => {
                Some("waiting for another member to confirm that the saved state is the newest".to_owned())
            }
            Standing::Older { by } => Some(format!(
                "the saved state is older than the one known to {by}, as after restoring a backup: it would give addresses twice. Restore the newest state, or: weft stop, weft reset, and launch it again"
            )),
            Standing::Copy { reason, .. } => Some(reason.clone()),
        }
    }

    /// Counts changes of owned ranges and given addresses; it identifies an older state.
    pub fn generation(&self) -> u64 {
        self.storage.generation().unwrap_or(self.state.generation)
    }

    /// A peer has refused this host: another host with the same identity is linked with it and answers.
    pub fn handle_same_identity(&mut self, now: Instant, reason: &str) {
        let plain = reason.chars().filter(|c| !c.is_control());
        let reason: String = plain.take(NAME_BYTES_MAX).collect();
        let news = !matches!(self.standing, Standing::Copy { .. } | Standing::Older { .. });
        if !matches!(self.standing, Standing::Older { .. }) {
            let until = now + Duration::from_secs(COPY_HOLD_S);
            self.standing = Standing::Copy { reason, until };
        }
        if news {
            self.tell_unsure();
        }
        self.drive(now);
    }

    /// A peer says which generation of this host's state it has seen.
    pub(crate) fn handle_known(
        &mut self,
        now: Instant,
        peer: PeerId,
        generation: u64,
    ) -> Result<(), MeshError> {
        // What this host has reached itself may be higher.
        if generation > RELAYED_VERSION_MAX.max(self.state.generation) {
            return Err(MeshError::Malformed { peer, what: "an impossible generation" });
        }
        if generation > self.state.generation {
            if !self.standing.is_sure() {
                self.found_older(peer);
            } else if self.state.weft.network.is_none() {
                // The disk was lost: its new ranges and addresses come after those of the lost state.
                self.state.generation = generation;
                self.dirty = true;
            }
            return Ok(());
        }
        if let Standing::Doubt(doubt) = &mut self.standing {
            doubt.answered.insert(peer);
            doubt.until.get_or_insert(now + Duration::from_secs(DOUBT_LINGER_S));
        }
        Ok(())
    }

    /// A peer knows a later state of this host than this host does.
    pub(crate) fn found_older(&mut self, peer: PeerId) {
        if !matches!(self.standing, Standing::Older { .. }) {
            self.standing = Standing::Older { by: self.name_of(peer) };
            self.tell_unsure();
        }
    }

    /// A peer says which generation its own state has. It is saved within [`GENERATION_SAVE_S`], not at once: a change
    /// on one host would otherwise be a write on all.
    pub(crate) fn handle_generation(
        &mut self,
        now: Instant,
        peer: PeerId,
        generation: u64,
    ) -> Result<(), MeshError> {
        if generation > ANNOUNCEMENT_VERSION_MAX {
            return Err(MeshError::Malformed { peer, what: "an impossible generation" });
        }
        if self.members.note_generation(peer, generation) {
            self.generations_at.get_or_insert(now + Duration::from_secs(GENERATION_SAVE_S));
        }
        Ok(())
    }

    /// Ends the doubt once all members have answered, or the wait for them is over.
    pub(crate) fn drive_doubt(&mut self, now: Instant) {
        let due = |at: &Option<Instant>| at.is_some_and(|at| at <= now);
        match &self.standing {
            Standing::Copy { until, .. } if *until <= now => {
                self.standing = Standing::doubt(now, true);
                for peer in self.linked() {
                    self.send(peer, Message::KnownAsked);
                }
            }
            Standing::Doubt(doubt) => {
                let all = self.members.iter().all(|(peer, _)| doubt.answered.contains(&peer));
                if all || due(&doubt.until) || due(&doubt.alone_until) {
                    self.standing = Standing::Sure;
                    self.dirty = true;
                    self.emit(Output::Changed(Change::StateBelieved));
                    for (vni, peer) in self.all_sharers() {
                        self.send_held(peer, vni);
                        self.send_open_grants(peer, vni);
                    }
                }
            }
            _ => {}
        }
    }

    /// Sends a peer the generation known of it, and this host's generation.
    pub(crate) fn send_generations(&mut self, peer: PeerId) {
        self.send_known(peer);
        let generation = self.state.generation;
        self.send(peer, Message::Generation { generation });
    }

    pub(crate) fn send_known(&mut self, peer: PeerId) {
        let generation = self.members.get(peer).map_or(0, |member| member.generation);
        self.send(peer, Message::Known { generation });
    }

    fn tell_unsure(&mut self) {
        if let Some(why) = self.unsure() {
            self.emit(Output::Changed(Change::StateDoubted { why }));
        }
    }
}
