//! linux: the vector engine: workers, lanes, flow tables, sealing, coalescing.
#![forbid(unsafe_code)]
