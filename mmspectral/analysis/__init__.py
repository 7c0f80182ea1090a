"""Floor 4: instruments for trained and untrained models: spectra, saturation, Jacobian, calibration, complexity.

Names are imported when they are first used, so that a hook that reads spectra
does not load the backbones, matplotlib or jinja2.
"""

from mmspectral.lazy import lazy_names

_NAMES = {
    "approximation": ("ApproximationError", "approximation_error", "kernel_attention"),
    "checkpoint_calibration": ("calibrate_checkpoint", "checkpoint_inputs"),
    "complexity": ("Complexity", "ModelComplexity", "count_complexity", "count_config"),
    "conditioning_report": ("Subject", "build_model", "collect_report", "measure", "stock_twin"),
    "dark_calibration": ("CalibratedGeometry", "Fit", "Geometry", "calibrate_geometry", "query_key_moments"),
    "jacobian": ("HeadJacobian", "JacobianSettings", "head_jacobian", "xca_temperature"),
    "model_calibration": (
        "calibratable_kernels",
        "calibrate_model",
        "calibration_batches",
        "calibration_table",
        "gather_inputs",
        "see",
    ),
    "prediction_sheet": ("draw_prediction_sheet",),
    "projections": (
        "AttentionProjection",
        "ProjectionCondition",
        "Spectrum",
        "attention_projections",
        "projection_conditions",
        "spectrum",
        "spread",
    ),
    "report_page": ("plot_projection_conditions", "render_report", "verdict"),
    "run_logs": ("kappa_history", "last_checkpoint", "last_metrics", "run_config", "training_curves"),
    "saturation": ("largest_scale", "probe_backbone", "saturation_rows", "saturation_table"),
    "stock_twins": ("FAMILIES", "DenseBackbone"),
    "tables": ("markdown_table", "write_csv"),
    "traffic": ("Traffic", "TrafficCounter", "backbone_traffic", "count_traffic", "ratios"),
}
__getattr__, __all__ = lazy_names(__name__, _NAMES)
