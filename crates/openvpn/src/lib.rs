//! pure: the OpenVPN control channel, as a state machine.
#![forbid(unsafe_code)]
