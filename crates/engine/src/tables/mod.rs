//! The tables of the workers: networks, peers, paths, SAs, endpoints, lanes, and which lane each flow takes.

pub(crate) mod flows;
pub(crate) mod hash;
pub(crate) mod lane;
pub(crate) mod networks;
pub(crate) mod sa;
pub(crate) mod state;
