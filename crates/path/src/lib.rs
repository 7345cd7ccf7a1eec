//! pure: choosing, probing, rekeying and failing over a path to one peer.
//!
//! [`Paths`] is the state machine: link events, control messages, engine events and time go in;
//! [`EngineCommand`]s, control messages and state changes come out. The receiver decides: it
//! installs its SAs, then offers them. The sender takes the offer and proves the path by probes
//! whose answers return over the link. Only then does it send frames (`docs/design/paths.md`). Each
//! direction is independent.
#![forbid(unsafe_code)]

mod candidate;
mod choice;
mod config;
mod engine_api;
mod inbound;
mod lanes;
mod message;
mod pairing;
mod paths;
mod peer;
mod prober;
mod relapse;
mod room;
mod shared;
mod spi;
mod status;

pub use config::{
    CARRY_ON_MS, CHANGES_QUEUED_MAX, CLEAN_BEFORE_MOVE_MS, Config, DRAIN_MS, DRAIN_SHORTEST_MS,
    ENGINE_HOLD_FIRST_MS, ENGINE_SOUND_MS, ENGINES_MAX, EngineOffer, GENERATIONS_MAX, KEEPALIVE_MS,
    LANES_MAX, LANES_TURN_FIRST_MS, LANES_TURN_MAX_MS, LINK_GRACE_MS, LINK_MTU_MIN,
    MESSAGES_QUEUED_MAX, MTU_FLOOR, MTU_RAISE_NARROW_S, MTU_RAISE_S, OFFER_INTERVAL_MS,
    OFFER_SENDINGS_MAX, PLAIN_PORT, PROBE_TURN_MS, PROBES_UNANSWERED_MAX, RELAPSE_FIRST_MS,
    RELAPSE_MAX_MS, RELAPSE_WITHIN_MS, RESEND_MS, RETIRED_MAX, RETRY_FIRST_MS, RETRY_MAX_MS,
    SESSION_SPIS_MAX, SETTLE_MS, UNHEARD_MS, overhead,
};
pub use engine_api::{
    Encapsulation, Endpoint, EngineCommand, EngineEvent, EngineKind, InboundSa, OutboundSa, PathId,
};
pub use message::{
    Accept, EngineAbility, Hello, LaneOffer, Message, MessageError, MissingEngine, Offer,
    ProbeAnswer, RekeyRequest, Unheard, Withdraw,
};
pub use paths::Paths;
pub use status::{Counters, PathChange, PathState, PathStatus, Reason, overall};
pub use weft_packet::ethernet::{Mac, ParseMacError};
pub use weft_packet::vxlan::Vni;
