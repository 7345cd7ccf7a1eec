//! pure: choosing, probing, rekeying and failing over a path to one peer.
#![forbid(unsafe_code)]

mod seam;

pub use seam::{
    Endpoint, EngineCommand, EngineEvent, EngineKind, InboundSa, Mac, OutboundSa, ParseMacError,
    PathId, Vni,
};
