//! secure
