//! broadcast
