//! dev: the stage of demo, benchmark and labs, and the figures beside other networks.
#![forbid(unsafe_code)]

pub mod comparison;
pub mod demo;
pub mod sandbox;
